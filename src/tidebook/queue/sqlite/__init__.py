"""The queue store in one SQLite file."""
