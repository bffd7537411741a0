"""The outbox on SQLite."""
