"""The commands of ./dev. Modules that run before .venv exists use only the standard library."""
