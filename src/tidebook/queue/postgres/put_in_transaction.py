"""Put inside the caller's transaction, given as a psycopg or SQLAlchemy connection or session."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import psycopg

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.postgres.errors import from_psycopg
from tidebook.queue.port import Put, Synchronous
from tidebook.runtime.autocommit import commits_each_statement

_LEVELS = ("off", "local", "remote_write", "on", "remote_apply")
_ACCEPTED = "give a psycopg connection, or a SQLAlchemy session or connection on psycopg or asyncpg, sync or async"


def put_in_transaction(
    transaction: Any, sql: str, parameters: tuple[object, ...], level: Synchronous, count: int
) -> Put | Awaitable[Put]:
    """Put in the caller's transaction; return an awaitable if its driver is async."""
    if callable(getattr(transaction, "run_sync", None)):  # SQLAlchemy's AsyncSession or AsyncConnection
        return _put_async_sqlalchemy(transaction, sql, parameters, level, count)
    if isinstance(transaction, psycopg.AsyncConnection):
        return _put_async(transaction, sql, parameters, level, count)
    connection = _connection_of(transaction)
    _require_transaction(connection)
    try:
        connection.execute(_raise_commit_level(level))
        row = connection.execute(sql, parameters).fetchone()
    except psycopg.Error as error:
        raise from_psycopg(error, writes=False) from error
    return _put_result(row, count)


async def _put_async(
    connection: psycopg.AsyncConnection[Any], sql: str, parameters: tuple[object, ...], level: Synchronous, count: int
) -> Put:
    _require_transaction(connection)
    try:
        await connection.execute(_raise_commit_level(level))
        cursor = await connection.execute(sql, parameters)
        return _put_result(await cursor.fetchone(), count)
    except psycopg.Error as error:
        raise from_psycopg(error, writes=False) from error


async def _put_async_sqlalchemy(
    session: Any, sql: str, parameters: tuple[object, ...], level: Synchronous, count: int
) -> Put:
    put: Put = await session.run_sync(lambda inner: put_in_transaction(inner, sql, parameters, level, count))
    return put


class _SqlAlchemy:
    """Adapts a SQLAlchemy connection to the methods of psycopg that are used here."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        dialect = connection.dialect
        self._numbered = dialect.paramstyle == "numeric_dollar"
        if dialect.name != "postgresql" or dialect.paramstyle not in {"format", "pyformat", "numeric_dollar"}:
            raise InvalidInput(f"{dialect.name} on {dialect.driver} is not supported: {_ACCEPTED}")

    def is_outside_transaction(self) -> bool:
        """Return whether the connection is in autocommit mode and in no transaction."""
        return commits_each_statement(self._connection)

    def execute(self, sql: str | bytes, parameters: tuple[object, ...] | None = None) -> Any:
        text = sql.decode() if isinstance(sql, bytes) else sql
        if self._numbered and parameters:
            first, *others = text.split("%s")
            text = first + "".join(f"${number}{other}" for number, other in enumerate(others, 1))
        try:
            return self._connection.exec_driver_sql(text, parameters)
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
    if callable(getattr(transaction, "exec_driver_sql", None)):
        return _SqlAlchemy(transaction)
    if callable(getattr(transaction, "get_bind", None)) and callable(getattr(transaction, "connection", None)):
        return _SqlAlchemy(transaction.connection())
    kind = type(transaction)
    raise InvalidInput(f"{kind.__module__}.{kind.__qualname__} is not a PostgreSQL transaction: {_ACCEPTED}")


def _require_transaction(connection: Any) -> None:
    if (
        connection.is_outside_transaction()
        if isinstance(connection, _SqlAlchemy)
        else commits_each_statement(connection)
    ):
        raise InvalidInput("the connection is in autocommit and in no transaction: begin one, and put inside it")


def _raise_commit_level(level: Synchronous) -> bytes:
    """Return SQL that raises the transaction's synchronous_commit to the queue's level, and never lowers it."""
    order = "array['" + "','".join(_LEVELS) + "']"
    current = "current_setting('synchronous_commit')"
    return (
        f"SELECT set_config('synchronous_commit', '{level}', true)"
        f" WHERE array_position({order}, {current}) < array_position({order}, '{level}')"
    ).encode()


def _put_result(row: Any, count: int) -> Put:
    now_ms, merged = row
    return Put(count - merged, merged, now_ms)
