"""`put` inside the caller's own transaction, whose session or connection is taken by its shape."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import psycopg

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.sql.port.queue import Put, Synchronous
from tidebook.sql.postgres.failures import from_psycopg

_LEVELS = ("off", "local", "remote_write", "on", "remote_apply")
_ACCEPTED = "give a psycopg connection, or a SQLAlchemy session or connection on psycopg or asyncpg, sync or async"
_IDLE = psycopg.pq.TransactionStatus.IDLE


def put_within(
    transaction: Any, sql: str, parameters: tuple[object, ...], level: Synchronous, count: int
) -> Put | Awaitable[Put]:
    """Run the put there; awaitable where the driver is."""
    if callable(getattr(transaction, "run_sync", None)):  # SQLAlchemy's AsyncSession or AsyncConnection
        return _within_async_sqlalchemy(transaction, sql, parameters, level, count)
    if isinstance(transaction, psycopg.AsyncConnection):
        return _within_async(transaction, sql, parameters, level, count)
    connection = _connection_of(transaction)
    _refuse_autocommit(connection)
    try:
        connection.execute(_raise_level(level))
        row = connection.execute(sql, parameters).fetchone()
    except psycopg.Error as error:
        raise from_psycopg(error, writes=False) from error
    return _put(row, count)


async def _within_async(
    connection: psycopg.AsyncConnection[Any], sql: str, parameters: tuple[object, ...], level: Synchronous, count: int
) -> Put:
    _refuse_autocommit(connection)
    try:
        await connection.execute(_raise_level(level))
        cursor = await connection.execute(sql, parameters)
        return _put(await cursor.fetchone(), count)
    except psycopg.Error as error:
        raise from_psycopg(error, writes=False) from error


async def _within_async_sqlalchemy(
    session: Any, sql: str, parameters: tuple[object, ...], level: Synchronous, count: int
) -> Put:
    put: Put = await session.run_sync(lambda inner: put_within(inner, sql, parameters, level, count))
    return put


class _SqlAlchemy:
    """A SQLAlchemy connection with the names that are used here."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        dialect = connection.dialect
        self._numbered = dialect.paramstyle == "numeric_dollar"
        if dialect.name != "postgresql" or dialect.paramstyle not in {"format", "pyformat", "numeric_dollar"}:
            raise InvalidInput(f"{dialect.name} on {dialect.driver} is not known to the queue: {_ACCEPTED}")

    def alone(self) -> bool:
        """Whether it is in autocommit and in no transaction."""
        driver = self._connection.connection.driver_connection
        if hasattr(driver, "info"):  # psycopg
            return _alone(driver)
        detect = getattr(self._connection.dialect, "detect_autocommit_setting", None)
        return detect is not None and bool(detect(self._connection.connection.dbapi_connection))

    def execute(self, sql: str | bytes, parameters: tuple[object, ...] | None = None) -> Any:
        text = sql.decode() if isinstance(sql, bytes) else sql
        if self._numbered and parameters:
            first, *others = text.split("%s")
            text = first + "".join(f"${place}{other}" for place, other in enumerate(others, 1))
        try:
            return self._connection.exec_driver_sql(text, parameters)
        except Exception as error:
            driver = getattr(error, "orig", None)  # what SQLAlchemy wraps; its other errors are the caller's own
            if driver is None:
                raise
            if isinstance(driver, psycopg.Error):
                raise from_psycopg(driver, writes=False) from error
            told = str(driver).strip().partition("\n")[0] or type(driver).__name__
            raise Unavailable(f"PostgreSQL: {told}") from error


def _connection_of(transaction: Any) -> Any:
    if isinstance(transaction, psycopg.Connection):
        return transaction
    if callable(getattr(transaction, "exec_driver_sql", None)):
        return _SqlAlchemy(transaction)
    if callable(getattr(transaction, "get_bind", None)) and callable(getattr(transaction, "connection", None)):
        return _SqlAlchemy(transaction.connection())
    kind = type(transaction)
    raise InvalidInput(f"{kind.__module__}.{kind.__qualname__} is no transaction on PostgreSQL: {_ACCEPTED}")


def _refuse_autocommit(connection: Any) -> None:
    if connection.alone() if isinstance(connection, _SqlAlchemy) else _alone(connection):
        raise InvalidInput("the connection is in autocommit and in no transaction: begin one, and put inside it")


def _alone(driver: Any) -> bool:
    return bool(driver.autocommit) and driver.info.transaction_status == _IDLE


def _raise_level(level: Synchronous) -> bytes:
    """Make the caller's commit wait for as much as the queue asks, never for less than he asks himself."""
    order = "array['" + "','".join(_LEVELS) + "']"
    current = "current_setting('synchronous_commit')"
    return (
        f"SELECT set_config('synchronous_commit', '{level}', true)"
        f" WHERE array_position({order}, {current}) < array_position({order}, '{level}')"
    ).encode()


def _put(row: Any, count: int) -> Put:
    now_ms, merged = row
    return Put(count - merged, merged, now_ms)
