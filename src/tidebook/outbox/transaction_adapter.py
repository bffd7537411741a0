"""Run statements in the caller's transaction. Sessions and connections are recognized, no driver is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tidebook.core.errors import InvalidInput, NotFound
from tidebook.outbox.sql import Dialect, SqlStatement, Style, dialect
from tidebook.runtime.autocommit import class_packages, commits_each_statement, driver_of, sqlalchemy_connection
from tidebook.sqlite.libraries import refuse_apsw

_ACCEPTED = (
    "pass a SQLAlchemy 2 session or connection (sync or async), Django's connection, or a connection of psycopg, "
    "psycopg2, pymysql, mysqlclient, mysql-connector, mariadb, sqlite3 or apsw"
)
#: The database and the parameter style of a driver, by its top-level package.
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
_STYLES: dict[str, Style] = {"pyformat": "format", "format": "format", "qmark": "qmark", "numeric_dollar": "dollar"}
_POSTGRES_NO_TABLE = "42P01"
_MYSQL_NO_TABLE = 1146
_TABLES = {"kafka_messages", "kafka_outbox", "kafka_order_lock", "kafka_wake"}
_CAUSES_MAX = 5


class TransactionAdapter(NamedTuple):
    """Runs statements on the caller's session or connection."""

    dialect: Dialect
    style: Style
    execute: Callable[[str, tuple[Any, ...]], Any]

    def run(self, statements: Iterable[SqlStatement]) -> None:
        """Run the statements in order; raise NotFound if the database lacks the outbox's tables."""
        with _missing_tables_reported():
            for statement in statements:
                self.execute(*statement)

    async def run_async(self, statements: Iterable[SqlStatement]) -> None:
        """Run the statements in order with a driver whose `execute` is awaited; raise the errors of `run`."""
        with _missing_tables_reported():
            for statement in statements:
                await self.execute(*statement)


@contextmanager
def _missing_tables_reported() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not lacks_tables(error):
            raise
        raise NotFound(
            "this database has no outbox tables, and nothing was published: run 'tidebook outbox migrate' with a book "
            "whose [sql] url names it, or call tidebook.outbox.create_tables(connection) once"
        ) from error


def lacks_tables(error: BaseException) -> bool:
    """Return whether a statement failed because an outbox table is missing, whichever driver reports it."""
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None:
            return False
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        number = getattr(cause, "errno", None) or (cause.args[0] if cause.args else None)
        # SQLite has no error code for a missing table, and no driver reports its name outside the message.
        sqlite = bool({"sqlite3", "apsw"} & set(class_packages(cause))) and "no such table" in str(cause)
        if sqlite or state == _POSTGRES_NO_TABLE or number == _MYSQL_NO_TABLE:
            return any(table in str(cause) for table in _TABLES)
        cause = getattr(cause, "orig", None) or cause.__cause__
    return False


def session_of(target: Any) -> Any:
    """Return the current session of SQLAlchemy's `scoped_session`, which proxies few methods; else `target` itself."""
    registry = getattr(target, "registry", None) if "sqlalchemy" in class_packages(target) else None
    return registry() if callable(registry) else target


def is_async_sqlalchemy(target: Any) -> bool:
    """Return whether the target is an AsyncSession or AsyncConnection, whose `run_sync` passes the sync one."""
    return "sqlalchemy" in class_packages(target) and callable(getattr(target, "run_sync", None))


def is_async_driver(target: Any) -> bool:
    """Return whether the target is a driver's async connection."""
    return driver_of(target) is not None and inspect.iscoroutinefunction(getattr(target, "execute", None))


def adapt_transaction(target: Any, *, transaction: bool = True) -> TransactionAdapter:
    """Return an adapter that runs statements in the caller's transaction.

    Raise InvalidInput if the target is not recognized or, unless `transaction=False`, is not in a transaction.
    """
    if driver_of(target) is None and (connection := sqlalchemy_connection(target)) is not None:
        return _sqlalchemy(connection, transaction)
    if hasattr(target, "vendor") and hasattr(target, "settings_dict"):
        return _django(target, transaction)
    driver = driver_of(target)
    if driver is None or not callable(getattr(target, "cursor", None)):  # a driver's cursors and pools have none
        raise InvalidInput(
            f"{type(target).__module__}.{type(target).__name__} is not a session or connection: {_ACCEPTED}"
        )
    if inspect.iscoroutinefunction(getattr(target, "cursor", None)):
        raise InvalidInput(f"the async connection of {driver} is not supported by the outbox: {_ACCEPTED}")
    if driver == "apsw":
        refuse_apsw(target)
    if transaction:
        _require_transaction(target)
    name, style = _DRIVERS[driver]
    cursors = getattr(getattr(target, "cursor_factory", None), "__mro__", ())
    if any("Raw" in kind.__name__ for kind in cursors):  # psycopg's raw cursors take PostgreSQL's own `$1` parameters
        style = "dollar"
    return TransactionAdapter(name, style, _dbapi_execute(driver, target))


def _sqlalchemy(connection: Any, transaction: bool) -> TransactionAdapter:
    name = dialect(connection.dialect.name)
    style = _STYLES.get(connection.dialect.paramstyle)
    if style is None:
        raise InvalidInput(
            f"the driver's parameter style {connection.dialect.paramstyle!r} is not supported by the outbox"
        )
    inner = getattr(connection.connection, "driver_connection", None)
    if driver_of(inner) == "apsw":
        refuse_apsw(inner)
    if transaction:
        _require_transaction(connection)
    if driver_of(inner) == "psycopg":
        style = "binary"

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        connection.exec_driver_sql(sql, parameters or None).close()

    return TransactionAdapter(name, style, execute)


def _django(connection: Any, transaction: bool) -> TransactionAdapter:
    if transaction and commits_each_statement(connection):
        raise InvalidInput("Django's connection is in autocommit mode: publish inside transaction.atomic()")

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)

    return TransactionAdapter(dialect(connection.vendor), "format", execute)


def _require_transaction(connection: Any) -> None:
    """Raise InvalidInput if the messages would be committed apart from the caller's writes."""
    if commits_each_statement(connection):
        raise InvalidInput("the connection is in autocommit mode: begin a transaction, and publish inside it")


def _dbapi_execute(driver: str, connection: Any) -> Callable[[str, tuple[Any, ...]], Any]:
    if driver == "psycopg":
        return lambda sql, parameters: connection.execute(sql, parameters or None)
    if driver in {"sqlite3", "apsw"}:
        return connection.execute  # type: ignore[no-any-return]

    def execute(sql: str, parameters: tuple[Any, ...]) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute(sql, parameters or None)
            if cursor.description is not None:  # mysql-connector refuses to close a cursor with unread rows
                cursor.fetchall()
        finally:
            cursor.close()

    return execute
