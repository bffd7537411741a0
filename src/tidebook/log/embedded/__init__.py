"""The log on one machine: a SQLite file in the book's folder."""

from tidebook.log.embedded.log import EmbeddedLog

__all__ = ["EmbeddedLog"]
