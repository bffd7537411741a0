"""The caller's session or connection, taken by its shape: no driver and no framework is imported for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tidebook.core.errors import InvalidInput
from tidebook.sql.port.dialect import Dialect, Style, dialect
from tidebook.sql.queries.outbox_publish import Statement

_ACCEPTED = (
    "give a SQLAlchemy 2 session or connection (sync or async), Django's connection, or a connection of psycopg, "
    "psycopg2, pymysql, mysqlclient, mariadb, sqlite3 or apsw"
)
#: A driver's top package → its database and how it writes parameters.
_DRIVERS: dict[str, tuple[Dialect, Style]] = {
    "psycopg": ("postgresql", "binary"),
    "psycopg2": ("postgresql", "format"),
    "pymysql": ("mysql", "format"),
    "MySQLdb": ("mysql", "format"),
    "mysql": ("mysql", "format"),
    "mariadb": ("mysql", "qmark"),
    "sqlite3": ("sqlite", "qmark"),
    "apsw": ("sqlite", "qmark"),
}
_STYLES: dict[str, Style] = {
    "pyformat": "format",
    "format": "format",
    "qmark": "qmark",
    "numeric_dollar": "dollar",
}
_PSYCOPG_IDLE = 0
_MYSQL_IN_TRANSACTION = 1


class Caller(NamedTuple):
    """Runs statements where the caller's own run."""

    dialect: Dialect
    style: Style
    execute: Callable[[str, tuple[Any, ...]], Any]

    def run(self, statements: Iterable[Statement]) -> None:
        """Run them one after the other."""
        for statement in statements:
            self.execute(*statement)

    async def run_async(self, statements: Iterable[Statement]) -> None:
        """Run them with a driver whose `execute` is awaited."""
        for statement in statements:
            await self.execute(*statement)


def is_async_sqlalchemy(target: Any) -> bool:
    """Whether it is an AsyncSession or AsyncConnection: `run_sync` hands out the sync one inside."""
    return _top(target) == "sqlalchemy" and callable(getattr(target, "run_sync", None))


def is_async_driver(target: Any) -> bool:
    """Whether it is a driver's own async connection."""
    return _driver(target) is not None and inspect.iscoroutinefunction(getattr(target, "execute", None))


def caller(target: Any, *, transaction: bool = True) -> Caller:
    """How to run statements in the caller's transaction; `transaction=False` does not insist that there is one."""
    if _driver(target) is None and callable(getattr(target, "exec_driver_sql", None)):
        return _sqlalchemy(target, transaction)
    if callable(getattr(target, "get_bind", None)) and callable(getattr(target, "connection", None)):
        return _sqlalchemy(target.connection(), transaction)
    if hasattr(target, "vendor") and hasattr(target, "settings_dict"):
        return _django(target, transaction)
    driver = _driver(target)
    if driver is None:
        raise InvalidInput(f"{type(target).__module__}.{type(target).__name__} is no transaction: {_ACCEPTED}")
    if transaction:
        _refuse_autocommit(target)
    return Caller(*_DRIVERS[driver], _dbapi_execute(driver, target))


def _sqlalchemy(connection: Any, transaction: bool) -> Caller:
    name = dialect(connection.dialect.name)
    style = _STYLES.get(connection.dialect.paramstyle)
    if style is None:
        raise InvalidInput(f"the driver's parameter style {connection.dialect.paramstyle!r} is not known to the outbox")
    inner = getattr(connection.connection, "driver_connection", None)
    if transaction:
        _refuse_autocommit(inner)
    if _driver(inner) == "psycopg":
        style = "binary"

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        connection.exec_driver_sql(sql, parameters or None)

    return Caller(name, style, execute)


def _django(connection: Any, transaction: bool) -> Caller:
    if transaction and not connection.in_atomic_block and connection.get_autocommit():
        raise InvalidInput("Django's connection is in autocommit: publish inside transaction.atomic()")

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)

    return Caller(dialect(connection.vendor), "format", execute)


def _dbapi_execute(driver: str, connection: Any) -> Callable[[str, tuple[Any, ...]], Any]:
    if driver in {"psycopg", "sqlite3", "apsw"}:
        return lambda sql, parameters: connection.execute(sql, parameters or _NOTHING[driver])

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute(sql, parameters or None)
        finally:
            cursor.close()

    return execute


_NOTHING: dict[str, Any] = {"psycopg": None, "sqlite3": (), "apsw": ()}


def _refuse_autocommit(connection: Any) -> None:
    """A connection on which the messages would be committed by themselves is a mistake worth telling."""
    match _driver(connection):
        case "psycopg":
            alone = connection.autocommit and connection.info.transaction_status == _PSYCOPG_IDLE
        case "psycopg2":
            alone = connection.autocommit
        case "pymysql":
            alone = connection.get_autocommit() and not connection.server_status & _MYSQL_IN_TRANSACTION
        case "sqlite3":
            autocommit = getattr(connection, "autocommit", -1) is True  # -1 in 3.12: as isolation_level says
            alone = (autocommit or connection.isolation_level is None) and not connection.in_transaction
        case "apsw":
            alone = not connection.in_transaction
        case _:
            alone = False
    if alone:
        raise InvalidInput("the connection is in autocommit and in no transaction: begin one, and publish inside it")


def _top(target: Any) -> str:
    return type(target).__module__.partition(".")[0]


def _driver(target: Any) -> str | None:
    for kind in type(target).__mro__:
        top = kind.__module__.partition(".")[0]
        if top in _DRIVERS:
            return top
    return None
