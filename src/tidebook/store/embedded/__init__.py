"""The store on one machine: a SQLite file in the book's folder."""

from tidebook.store.embedded.store import EmbeddedStore

__all__ = ["EmbeddedStore"]
