"""The outbox on MariaDB and MySQL."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import CLIENT, ER

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.outbox.migrations.tables import create_statements
from tidebook.outbox.port import BatchLimit, TopicLock, WaitingMessage
from tidebook.outbox.sql_dialect import MYSQL
from tidebook.outbox.sql_operation import OperatorOutboxStore
from tidebook.outbox.sql_relay import RelayStatements
from tidebook.outbox.sql_store import Row

CONNECT_S_MAX = 4
ANSWER_S_MAX = 60
#: How long a statement may wait for a row that another transaction has locked.
LOCK_S_MAX = 2
PORT = 3306
_STATEMENTS = RelayStatements(MYSQL)

# DISTINCT is a loose index scan over the primary key: one probe per topic, however many rows wait.
_TOPICS_IN_USE = "SELECT DISTINCT topic FROM kafka_messages"
_TOPICS = f"""\
SELECT m.topic FROM ({_TOPICS_IN_USE}) m LEFT JOIN kafka_topic_info i ON i.topic = m.topic
WHERE i.topic IS NULL OR {_STATEMENTS.lockable}
UNION
SELECT i.topic FROM kafka_topic_info i WHERE {_STATEMENTS.lockable} AND EXISTS (
    SELECT 1 FROM kafka_parked p WHERE p.topic = i.topic AND p.state = 1 AND p.retry_at <= UTC_TIMESTAMP(6)
)"""


class MysqlOutboxStore(OperatorOutboxStore):
    """A connection in autocommit, at isolation level READ COMMITTED."""

    dialect = "mysql"

    def __init__(self, connection: Any, *, lock_limit_ms: int, hold_parked: bool) -> None:
        super().__init__(_STATEMENTS, lock_limit_ms=lock_limit_ms, hold_parked=hold_parked)
        self._connection = connection
        self._run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self._run(f"SET SESSION innodb_lock_wait_timeout = {LOCK_S_MAX}")
        if "mariadb" in str(connection.get_server_info()).lower():
            # A relay that is stopped inside a transaction must not keep the topic's row locked.
            self._run(f"SET SESSION idle_transaction_timeout = {math.ceil(lock_limit_ms / 1000)}")

    def create_tables(self) -> None:
        for statement in create_statements("mysql"):
            self._run(statement)

    def topics_waiting(self) -> list[str]:
        rows = self._rows(_TOPICS, (self._lock_limit_ms, self._lock_limit_ms))
        return [str(topic) for (topic,) in rows]

    def _topics_in_use(self) -> list[str]:
        return [str(topic) for (topic,) in self._rows(_TOPICS_IN_USE)]

    def close(self) -> None:
        try:
            self._connection.close()
        except pymysql.err.Error:
            pass  # the server has closed it

    # ---- the driver's primitives

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        with _translated(), self._connection.cursor() as cursor:
            cursor.execute(sql, tuple(parameters) or None)
            return list(cursor.fetchall())

    def _run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        with _translated(), self._connection.cursor() as cursor:
            return int(cursor.execute(sql, tuple(parameters) or None))

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

    def _uuid(self, value: bytes | None) -> bytes | None:
        return value

    def _select(self, lock: TopicLock, limit: BatchLimit, rewinds: int) -> list[WaitingMessage]:
        rows = self._rows(_STATEMENTS.batch, (lock.topic, 0, limit.rows, limit.size_bytes))
        return [WaitingMessage(*row) for row in rows]


class MysqlOutboxDatabase:
    """Opens connections to one database."""

    def __init__(self, url: str, *, lock_limit_ms: int, hold_parked: bool) -> None:
        self._parameters = connect_parameters(url)
        self._lock_limit_ms = lock_limit_ms
        self._hold_parked = hold_parked

    def connect(self) -> MysqlOutboxStore:
        with _translated():
            connection = pymysql.connect(
                **self._parameters,
                autocommit=True,
                binary_prefix=True,
                charset="utf8mb4",
                client_flag=CLIENT.FOUND_ROWS,  # an UPDATE counts matched rows, changed or not
                connect_timeout=CONNECT_S_MAX,
                read_timeout=ANSWER_S_MAX,
                write_timeout=ANSWER_S_MAX,
            )
        return MysqlOutboxStore(connection, lock_limit_ms=self._lock_limit_ms, hold_parked=self._hold_parked)

    def listen(self) -> None:
        """Return None: MySQL cannot notify, so the relay polls."""


def connect_parameters(url: str) -> dict[str, Any]:
    """Return pymysql's parameters for `mysql://user:password@host:port/database`."""
    parts = urlsplit(url)
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
    try:
        yield
    except pymysql.err.Error as error:
        raise translate(error) from error


def translate(error: Exception) -> TidebookError:
    """Return pymysql's error as Tidebook's. A commit with an unknown outcome is safe: the next lock resolves it."""
    code = error.args[0] if error.args else 0
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    if code in {ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR}:
        return Unavailable(f"the outbox's tables are missing or old ({text}): run 'tidebook outbox migrate'")
    if code in {ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.BAD_DB_ERROR}:
        return InvalidInput(f"MySQL refused: {text}: check the URL and the rights of its user")
    return Unavailable(f"MySQL: {text or type(error).__name__}")
