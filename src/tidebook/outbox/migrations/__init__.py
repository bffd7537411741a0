"""The outbox's tables, as plain SQL and as Alembic migrations."""
