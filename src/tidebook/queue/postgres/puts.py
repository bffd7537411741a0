"""Put inside the caller's transaction, given as a psycopg or SQLAlchemy connection or session."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, NamedTuple

import psycopg

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.postgres.errors import from_psycopg
from tidebook.queue.port import Put, Synchronous
from tidebook.runtime.autocommit import commits_each_statement, number_placeholders, sqlalchemy_connection

_LEVELS = ("off", "local", "remote_write", "on", "remote_apply")
_ACCEPTED = "pass a psycopg connection, or a SQLAlchemy session or connection on psycopg or asyncpg, sync or async"


class PutCall(NamedTuple):
    """A put of `size` entries: its statement and parameters, and the least synchronous_commit of its transaction."""

    sql: str
    parameters: tuple[object, ...]
    level: Synchronous
    size: int

    def result(self, row: Any) -> Put:
        """Return the result from the statement's row."""
        now_ms, merged = row
        return Put(self.size - merged, merged, now_ms)


def put_in_transaction(transaction: Any, call: PutCall) -> Put | Awaitable[Put]:
    """Put in the caller's transaction; return an awaitable if its driver is async."""
    if callable(getattr(transaction, "run_sync", None)):  # SQLAlchemy's AsyncSession or AsyncConnection
        awaitable: Awaitable[Put] = transaction.run_sync(lambda inner: put_in_transaction(inner, call))
        return awaitable
    if isinstance(transaction, psycopg.AsyncConnection):
        return _put_async(transaction, call)
    connection = _connection_of(transaction)
    _require_transaction(connection)
    try:
        connection.execute(_raise_commit_level(call.level))
        return call.result(connection.execute(call.sql, call.parameters).fetchone())
    except psycopg.Error as error:
        raise from_psycopg(error, writes=False) from error


async def _put_async(connection: psycopg.AsyncConnection[Any], call: PutCall) -> Put:
    _require_transaction(connection)
    try:
        await connection.execute(_raise_commit_level(call.level))
        cursor = await connection.execute(call.sql, call.parameters)
        return call.result(await cursor.fetchone())
    except psycopg.Error as error:
        raise from_psycopg(error, writes=False) from error


class _SqlAlchemy:
    """Adapts a SQLAlchemy connection to the methods of psycopg that are used here."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        dialect = connection.dialect
        self._numbered = dialect.paramstyle == "numeric_dollar"
        if dialect.name != "postgresql" or dialect.paramstyle not in {"format", "pyformat", "numeric_dollar"}:
            raise InvalidInput(f"{dialect.name} on {dialect.driver} is not supported: {_ACCEPTED}")

    def execute(self, sql: str | bytes, parameters: tuple[object, ...] | None = None) -> Any:
        text = sql.decode() if isinstance(sql, bytes) else sql
        if self._numbered and parameters:
            text = number_placeholders(text, "%s")
        try:
            return self.connection.exec_driver_sql(text, parameters)
        except Exception as error:
            driver = getattr(error, "orig", None)  # the driver's error; SQLAlchemy's own errors are the caller's
            if driver is None:
                raise
            if isinstance(driver, psycopg.Error):
                raise from_psycopg(driver, writes=False) from error
            message = str(driver).strip().partition("\n")[0] or type(driver).__name__
            raise Unavailable(f"PostgreSQL: {message}") from error


def _connection_of(transaction: Any) -> Any:
    if isinstance(transaction, psycopg.Connection):
        return transaction
    if (connection := sqlalchemy_connection(transaction)) is not None:
        return _SqlAlchemy(connection)
    kind = type(transaction)
    raise InvalidInput(f"{kind.__module__}.{kind.__qualname__} is not a PostgreSQL transaction: {_ACCEPTED}")


def _require_transaction(connection: Any) -> None:
    if commits_each_statement(connection.connection if isinstance(connection, _SqlAlchemy) else connection):
        raise InvalidInput("the connection is in autocommit mode: begin a transaction, and put inside it")


def _raise_commit_level(level: Synchronous) -> bytes:
    """Return SQL that raises the transaction's synchronous_commit to the queue's level, and never lowers it."""
    order = "array['" + "','".join(_LEVELS) + "']"
    current = "current_setting('synchronous_commit')"
    return (
        f"SELECT set_config('synchronous_commit', '{level}', true)"
        f" WHERE array_position({order}, {current}) < array_position({order}, '{level}')"
    ).encode()
