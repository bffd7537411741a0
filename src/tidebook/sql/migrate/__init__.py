"""The tables, as plain SQL and as Alembic migrations."""
