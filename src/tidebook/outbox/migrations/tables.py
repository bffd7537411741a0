"""The outbox's tables in every dialect."""

from __future__ import annotations

from typing import assert_never

from tidebook.outbox.dialect import Dialect
from tidebook.outbox.migrations import mysql as outbox_mysql
from tidebook.outbox.migrations import postgres as outbox_postgres
from tidebook.outbox.migrations import sqlite as outbox_sqlite


def create_statements(dialect: Dialect) -> tuple[str, ...]:
    """Return the statements that create the missing tables; running them again changes nothing."""
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
    """Return the statements that drop the tables and all waiting messages."""
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
    """Return the tables as plain SQL, for psql, mysql, sqlite3 or a migration tool.

    >>> script("sqlite").splitlines()[0]
    'CREATE TABLE IF NOT EXISTS kafka_messages ('
    """
    return "".join(f"{statement};\n\n" for statement in create_statements(dialect))
