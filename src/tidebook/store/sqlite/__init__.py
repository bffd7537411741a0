"""The store in a SQLite file of the book's folder, for the processes of one machine."""

from tidebook.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
