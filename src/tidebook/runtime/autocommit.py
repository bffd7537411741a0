"""Recognize a caller's connection, and whether it is in a transaction; drivers and frameworks are never imported."""

from __future__ import annotations

from typing import Any

#: The top-level packages of the drivers that are recognized.
DRIVERS = frozenset({"psycopg", "psycopg2", "pymysql", "MySQLdb", "mysql", "mariadb", "sqlite3", "apsw"})
_POSTGRES_IDLE = 0
_MYSQL_IN_TRANSACTION = 1
_MYSQL_NO_SAVEPOINT = 1305


def class_packages(target: Any) -> list[str]:
    """Return the top-level packages of the object's class and of its base classes."""
    return [kind.__module__.partition(".")[0] for kind in type(target).__mro__]


def driver_of(target: Any) -> str | None:
    """Return the top-level package of the driver that the object belongs to, or None."""
    return next((package for package in class_packages(target) if package in DRIVERS), None)


def sqlalchemy_connection(target: Any) -> Any:
    """Return the SQLAlchemy connection of a session or connection, with its transaction; None for anything else."""
    if callable(getattr(target, "exec_driver_sql", None)):
        return target
    if callable(getattr(target, "get_bind", None)) and callable(getattr(target, "connection", None)):
        return target.connection()
    return None


def number_placeholders(sql: str, placeholder: str) -> str:
    """Return SQL with its placeholders replaced by `$1`, `$2` and so on, as PostgreSQL itself takes them.

    >>> number_placeholders("VALUES (?, ?)", "?")
    'VALUES ($1, $2)'
    """
    first, *others = sql.split(placeholder)
    return first + "".join(f"${number}{other}" for number, other in enumerate(others, 1))


def commits_each_statement(connection: Any) -> bool:
    """Return whether the connection is in autocommit and in no transaction; False where this cannot be determined.

    `connection` is a driver's connection (sync or async), SQLAlchemy's sync `Connection`, or Django's connection.
    """
    driver = driver_of(connection)
    if driver is not None:
        return _driver_commits(driver, connection)
    if hasattr(connection, "in_atomic_block"):  # Django
        return not connection.in_atomic_block and bool(connection.get_autocommit())
    if callable(getattr(connection, "exec_driver_sql", None)):
        return _sqlalchemy_commits(connection)
    return False


def _driver_commits(driver: str, connection: Any) -> bool:
    match driver:
        case "psycopg" | "psycopg2":
            return bool(connection.autocommit) and connection.info.transaction_status == _POSTGRES_IDLE
        case "pymysql" | "MySQLdb" | "mysql" | "mariadb":
            getter = getattr(connection, "get_autocommit", None)  # where it exists, `autocommit` is the setter
            autocommit = bool(getter() if callable(getter) else connection.autocommit)
            return autocommit and not _in_mysql_transaction(connection)
        case "sqlite3":
            autocommit = getattr(connection, "autocommit", -1) is True  # -1 in 3.12: isolation_level decides
            return (autocommit or connection.isolation_level is None) and not connection.in_transaction
        case "apsw":
            return not connection.in_transaction
        case _:
            return False


def _sqlalchemy_commits(connection: Any) -> bool:
    """Ask the driver's connection or, for a driver that only SQLAlchemy knows, SQLAlchemy's dialect."""
    inner = getattr(connection.connection, "driver_connection", None)
    driver = driver_of(inner)
    if driver is not None:
        return _driver_commits(driver, inner)
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
    cursor = connection.cursor()  # mysqlclient reports neither: a savepoint survives only inside a transaction
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
