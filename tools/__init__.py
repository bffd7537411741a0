"""The commands of ./dev. They use only the standard library, because they run before .venv exists."""
