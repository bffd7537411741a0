"""The outbox's tables on every database it knows."""

from __future__ import annotations

from typing import assert_never

from tidebook.sql.migrate import outbox_mysql, outbox_postgres, outbox_sqlite
from tidebook.sql.port.dialect import Dialect


def create_statements(dialect: Dialect) -> tuple[str, ...]:
    """What makes the tables where they are missing; running it again changes nothing."""
    match dialect:
        case "postgresql":
            return outbox_postgres.STATEMENTS
        case "mysql":
            return outbox_mysql.STATEMENTS
        case "sqlite":
            return outbox_sqlite.STATEMENTS
        case _:
            assert_never(dialect)


def drop_statements(dialect: Dialect) -> tuple[str, ...]:
    """What removes the tables and all that waits in them."""
    match dialect:
        case "postgresql":
            return outbox_postgres.DROP
        case "mysql":
            return outbox_mysql.DROP
        case "sqlite":
            return outbox_sqlite.DROP
        case _:
            assert_never(dialect)


def script(dialect: Dialect) -> str:
    """The tables as plain SQL, for psql, mysql, sqlite3 or a migration tool.

    >>> script("sqlite").splitlines()[0]
    'CREATE TABLE IF NOT EXISTS kafka_messages ('
    """
    return "".join(f"{statement};\n\n" for statement in create_statements(dialect))
