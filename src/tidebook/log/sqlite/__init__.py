"""The log in a SQLite file of the book's folder, for the processes of one machine."""

from tidebook.log.sqlite.log import SqliteLog

__all__ = ["SqliteLog"]
