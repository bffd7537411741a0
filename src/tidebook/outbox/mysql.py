"""The outbox on MariaDB and MySQL."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, unquote

import pymysql
from pymysql.constants import ER

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.store import OutboxDatabase, OutboxStore
from tidebook.runtime.secret import split_url

CONNECT_S_MAX = 4
ANSWER_S_MAX = 60
#: How long a statement may wait for a row that another transaction has locked.
LOCK_S_MAX = 2
PORT = 3306


class MysqlOutboxStore(OutboxStore):
    """A connection in autocommit, at isolation level READ COMMITTED."""

    dialect = "mysql"

    def __init__(self, connection: Any, settings: OutboxSettings) -> None:
        super().__init__(settings)
        self._connection = connection
        self._execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self._execute(f"SET SESSION innodb_lock_wait_timeout = {LOCK_S_MAX}")
        if "mariadb" in str(connection.get_server_info()).lower():
            # A relay that is stopped inside a transaction must not keep the topic's row locked.
            self._execute(f"SET SESSION idle_transaction_timeout = {math.ceil(settings.lock_limit_s)}")

    def close(self) -> None:
        with suppress(pymysql.err.Error):  # the server may have closed it
            self._connection.close()

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        with _translated():
            cursor = self._connection.cursor()  # buffered: the result is complete when `execute` returns
            cursor.execute(sql, tuple(parameters) or None)
            return cursor

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        with _translated():
            self._connection.begin()
            try:
                yield
            except BaseException:
                self._connection.rollback()
                raise
            self._connection.commit()


class MysqlOutboxDatabase(OutboxDatabase):
    """Opens connections to one database."""

    def __init__(self, url: str, settings: OutboxSettings) -> None:
        self._parameters = connect_parameters(url)
        self._settings = settings

    def connect(self) -> MysqlOutboxStore:
        with _translated():
            connection = pymysql.connect(
                **self._parameters,
                autocommit=True,
                binary_prefix=True,
                charset="utf8mb4",
                connect_timeout=CONNECT_S_MAX,
                read_timeout=ANSWER_S_MAX,
                write_timeout=ANSWER_S_MAX,
            )
        return MysqlOutboxStore(connection, self._settings)


def first_row(url: str, sql: str) -> Any:
    """Return the first row of a query on a separate connection."""
    with _translated():
        connection = pymysql.connect(
            **connect_parameters(url), connect_timeout=CONNECT_S_MAX, read_timeout=ANSWER_S_MAX
        )
        with connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchone()


def connect_parameters(url: str) -> dict[str, Any]:
    """Return pymysql's parameters for `mysql://user:password@host:port/database`."""
    parts = split_url(url, "the MySQL URL")
    try:
        port = parts.port or PORT
    except ValueError as error:
        raise InvalidInput(f"the MySQL URL has an invalid port: {error}") from error
    if parts.scheme.split("+")[0] not in {"mysql", "mariadb"} or not parts.hostname:
        raise InvalidInput(
            f"{parts.scheme[:20]!r} is not a MySQL URL, which has the form mysql://user@host:3306/database"
        )
    parameters: dict[str, Any] = {
        "host": parts.hostname,
        "port": port,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path.lstrip("/")),
    }
    if ca := dict(parse_qsl(parts.query)).get("ssl_ca"):
        parameters["ssl"] = {"ca": ca}
    return parameters


@contextmanager
def _translated() -> Iterator[None]:
    """Raise pymysql's errors as Tidebook's. A commit with an unknown outcome is safe: the next lock resolves it."""
    try:
        yield
    except pymysql.err.Error as error:
        raise _translate(error) from error


def _translate(error: Exception) -> TidebookError:
    code = error.args[0] if error.args else 0
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    if code in {ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR}:
        return Unavailable(f"the outbox's tables are missing or old ({text}): run 'tidebook outbox migrate'")
    if code in {ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.BAD_DB_ERROR}:
        return InvalidInput(f"MySQL refused: {text}: check the URL and the rights of its user")
    return Unavailable(f"MySQL: {text or type(error).__name__}")
