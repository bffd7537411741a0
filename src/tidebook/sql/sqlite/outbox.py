"""The outbox on SQLite: the application's own file, or one of the book's.

With the standard library's SQLite, as the application most likely uses: two copies of SQLite in one process (apsw
brings its own) would drop each other's locks on a file that both have open. For the same reason the file's journal
mode is left as it is: the standard library's copy may be one whose write-ahead log can lose pages.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidebook.core.errors import Corrupt, TidebookError, Unavailable
from tidebook.sql.migrate.outbox import create_statements
from tidebook.sql.port.outbox import BatchLimit, Hold, Waiting
from tidebook.sql.queries.outbox_operation import OperatedOutboxStore
from tidebook.sql.queries.outbox_relay import RelayStatements
from tidebook.sql.queries.outbox_store import Row
from tidebook.sql.queries.outbox_words import SQLITE

#: How long a write may wait for somebody else's transaction.
BUSY_S_MAX = 5.0
_STATEMENTS = RelayStatements(SQLITE)

_TOPICS_IN_USE = """\
WITH RECURSIVE found(topic) AS (
    SELECT (SELECT topic FROM kafka_messages ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT m.topic FROM kafka_messages m WHERE m.topic > found.topic ORDER BY m.topic LIMIT 1)
    FROM found WHERE found.topic IS NOT NULL
)
SELECT topic FROM found WHERE topic IS NOT NULL"""
_TOPICS = f"""\
SELECT m.topic FROM ({_TOPICS_IN_USE}) m LEFT JOIN kafka_topic_info i ON i.topic = m.topic
WHERE i.topic IS NULL OR {_STATEMENTS.lockable}
UNION
SELECT i.topic FROM kafka_topic_info i WHERE {_STATEMENTS.lockable} AND EXISTS (
    SELECT 1 FROM kafka_parked p WHERE p.topic = i.topic AND p.state = 1 AND p.retry_at <= {SQLITE.now}
)"""


class SqliteOutboxStore(OperatedOutboxStore):
    """One connection. Its transactions take the write lock when they begin, so that they never fail half-way."""

    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection, path: Path, *, lock_limit_ms: int, hold_parked: bool) -> None:
        super().__init__(_STATEMENTS, lock_limit_ms=lock_limit_ms, hold_parked=hold_parked)
        self._connection = connection
        self._path = path

    def create_tables(self) -> None:
        with self._transaction(durable=True):
            for statement in create_statements("sqlite"):
                self._run(statement)

    def topics_waiting(self) -> list[str]:
        return [str(topic) for (topic,) in self._rows(_TOPICS, (self._lock_limit_ms, self._lock_limit_ms))]

    def _topics_in_use(self) -> list[str]:
        return [str(topic) for (topic,) in self._rows(_TOPICS_IN_USE)]

    def close(self) -> None:
        self._connection.close()

    # ---- the driver's primitives

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        with self._translated():
            return self._connection.execute(sql.replace("%s", "?"), tuple(parameters)).fetchall()

    def _run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        with self._translated():
            return self._connection.execute(sql.replace("%s", "?"), tuple(parameters)).rowcount

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        with self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _uuid(self, value: bytes | None) -> bytes | None:
        return value

    def _select(self, hold: Hold, limit: BatchLimit, rewinds: int) -> list[Waiting]:
        rows = self._rows(_STATEMENTS.batch, (hold.topic, 0, limit.rows, limit.size_bytes))
        return [Waiting(*row) for row in rows]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise translate(error, self._path) from error


class SqliteOutboxDatabase:
    """Opens connections to one file."""

    def __init__(self, path: Path, *, lock_limit_ms: int, hold_parked: bool) -> None:
        self._path = path
        self._lock_limit_ms = lock_limit_ms
        self._hold_parked = hold_parked

    def connect(self) -> SqliteOutboxStore:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self._path, timeout=BUSY_S_MAX, isolation_level=None, check_same_thread=False, uri=False
            )
        except (OSError, sqlite3.Error) as error:
            raise Unavailable(f"{self._path}: {error}") from error
        return SqliteOutboxStore(
            connection, self._path, lock_limit_ms=self._lock_limit_ms, hold_parked=self._hold_parked
        )

    def listen(self) -> None:
        """SQLite calls nobody: the relay looks, and is nudged by publishers of its own process."""


def translate(error: sqlite3.Error, path: Path) -> TidebookError:
    """What SQLite reports, as Tidebook's own error."""
    if "no such table" in str(error) or "no such column" in str(error):
        return Unavailable(f"the outbox's tables are missing or old ({error}): run 'tidebook outbox migrate'")
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return Corrupt(f"{path} is damaged ({error}): it is left as it is; restore a copy of it")
    return Unavailable(f"{path}: {error}")
