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
    "psycopg2, pymysql, mysqlclient, mysql-connector, mariadb, sqlite3 or apsw"
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
_POSTGRES_IDLE = 0
_MYSQL_IN_TRANSACTION = 1
_MYSQL_NO_SAVEPOINT = 1305


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


def session_of(target: Any) -> Any:
    """The session of this thread or task where it is SQLAlchemy's registry of them, which hands on few calls."""
    registry = getattr(target, "registry", None) if "sqlalchemy" in _tops(target) else None
    return registry() if callable(registry) else target


def is_async_sqlalchemy(target: Any) -> bool:
    """Whether it is an AsyncSession or AsyncConnection: `run_sync` hands out the sync one inside."""
    return "sqlalchemy" in _tops(target) and callable(getattr(target, "run_sync", None))


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
    if driver is None or not callable(getattr(target, "cursor", None)):  # a driver's cursors and pools have none
        raise InvalidInput(f"{type(target).__module__}.{type(target).__name__} is no transaction: {_ACCEPTED}")
    if inspect.iscoroutinefunction(getattr(target, "cursor", None)):
        raise InvalidInput(f"the async connection of {driver} is not known to the outbox: {_ACCEPTED}")
    if transaction:
        _refuse(_alone(target))
    name, style = _DRIVERS[driver]
    return Caller(name, "dollar" if _writes_dollars(target) else style, _dbapi_execute(driver, target))


def _sqlalchemy(connection: Any, transaction: bool) -> Caller:
    name = dialect(connection.dialect.name)
    style = _STYLES.get(connection.dialect.paramstyle)
    if style is None:
        raise InvalidInput(f"the driver's parameter style {connection.dialect.paramstyle!r} is not known to the outbox")
    inner = getattr(connection.connection, "driver_connection", None)
    if transaction:
        _refuse(_alone_in_sqlalchemy(connection, inner) if _driver(inner) is None else _alone(inner))
    if _driver(inner) == "psycopg":
        style = "binary"

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        connection.exec_driver_sql(sql, parameters or None).close()

    return Caller(name, style, execute)


def _django(connection: Any, transaction: bool) -> Caller:
    if transaction and not connection.in_atomic_block and connection.get_autocommit():
        raise InvalidInput("Django's connection is in autocommit: publish inside transaction.atomic()")

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)

    return Caller(dialect(connection.vendor), "format", execute)


def _writes_dollars(connection: Any) -> bool:
    """Whether the cursors of psycopg's connection take a statement as PostgreSQL does."""
    factory = getattr(connection, "cursor_factory", None)
    return any("Raw" in kind.__name__ for kind in getattr(factory, "__mro__", ()))


def _dbapi_execute(driver: str, connection: Any) -> Callable[[str, tuple[Any, ...]], Any]:
    if driver in {"psycopg", "sqlite3", "apsw"}:
        return lambda sql, parameters: connection.execute(sql, parameters or _NOTHING[driver])

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute(sql, parameters or None)
            if cursor.description is not None:  # mysql-connector closes no cursor that was not read to its end
                cursor.fetchall()
        finally:
            cursor.close()

    return execute


_NOTHING: dict[str, Any] = {"psycopg": None, "sqlite3": (), "apsw": ()}


def _refuse(alone: bool) -> None:
    """A connection on which the messages would be committed by themselves is a mistake worth telling."""
    if alone:
        raise InvalidInput("the connection is in autocommit and in no transaction: begin one, and publish inside it")


def _alone(connection: Any) -> bool:
    """Whether a driver's connection is in autocommit and in no transaction."""
    match _driver(connection):
        case "psycopg" | "psycopg2":
            return bool(connection.autocommit) and connection.info.transaction_status == _POSTGRES_IDLE
        case "pymysql" | "MySQLdb" | "mysql" | "mariadb":
            tell = getattr(connection, "get_autocommit", None)  # where there is one, `autocommit` sets it
            return bool(tell() if callable(tell) else connection.autocommit) and not _in_mysql_transaction(connection)
        case "sqlite3":
            autocommit = getattr(connection, "autocommit", -1) is True  # -1 in 3.12: as isolation_level says
            return (autocommit or connection.isolation_level is None) and not connection.in_transaction
        case "apsw":
            return not connection.in_transaction
        case _:
            return False


def _alone_in_sqlalchemy(connection: Any, inner: Any) -> bool:
    """The same of a driver that only SQLAlchemy knows, where its dialect can tell."""
    detect = getattr(connection.dialect, "detect_autocommit_setting", None)
    try:
        autocommit = detect is not None and detect(connection.connection.dbapi_connection)
    except NotImplementedError:
        return False
    return bool(autocommit) and getattr(inner, "in_transaction", False) is not True


def _in_mysql_transaction(connection: Any) -> bool:
    for name, flag in (("in_transaction", True), ("server_status", _MYSQL_IN_TRANSACTION)):
        known = getattr(connection, name, None)
        if isinstance(known, int):
            return bool(known & flag)
    cursor = connection.cursor()  # mysqlclient does not tell: a savepoint lasts in a transaction only
    try:
        cursor.execute("SAVEPOINT tidebook_probe")
        cursor.execute("RELEASE SAVEPOINT tidebook_probe")
    except Exception as error:
        if error.args[:1] != (_MYSQL_NO_SAVEPOINT,):
            raise
        return False
    finally:
        cursor.close()
    return True


def _tops(target: Any) -> list[str]:
    """The top packages of its class and of those that it is derived from."""
    return [kind.__module__.partition(".")[0] for kind in type(target).__mro__]


def _driver(target: Any) -> str | None:
    return next((top for top in _tops(target) if top in _DRIVERS), None)
