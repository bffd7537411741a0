"""The outbox on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.sql.migrate.outbox import create_statements
from tidebook.sql.port.outbox import BatchLimit, Hold, Waiting
from tidebook.sql.postgres.connect import plain_url
from tidebook.sql.postgres.outbox_floor import Floors
from tidebook.sql.postgres.outbox_listener import PostgresListener
from tidebook.sql.queries.outbox_operation import OperatedOutboxStore
from tidebook.sql.queries.outbox_relay import RelayStatements
from tidebook.sql.queries.outbox_store import Row
from tidebook.sql.queries.outbox_words import POSTGRES

CONNECT_S_MAX = 10
#: How long a statement may wait for a row that somebody else's transaction has changed.
LOCK_MS_MAX = 2_000
_STATEMENTS = RelayStatements(POSTGRES)
_XMIN = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
_XMAX = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"

# Two probes of the index a topic, however many rows wait: is there a row behind its floor, and is there a topic
# between it and the next one? DISTINCT would read every row.
_TOPICS = f"""\
WITH known AS (
    SELECT topic, lead(topic, 1, '~') OVER (ORDER BY topic) AS next
    FROM (SELECT topic FROM kafka_topic_info UNION ALL SELECT '') names
)
SELECT i.topic FROM kafka_topic_info i LEFT JOIN
    unnest(%s::text[], %s::bigint[], %s::bigint[]) AS f(topic, floor, rewinds) USING (topic, rewinds)
WHERE {_STATEMENTS.lockable}
AND EXISTS (SELECT 1 FROM kafka_messages m WHERE m.topic = i.topic AND m.id > coalesce(f.floor, 0))
UNION ALL
SELECT fresh.topic FROM known k CROSS JOIN LATERAL (
    SELECT m.topic FROM kafka_messages m WHERE m.topic > k.topic AND m.topic < k.next ORDER BY m.topic LIMIT 1
) fresh
UNION
SELECT i.topic FROM kafka_topic_info i WHERE {_STATEMENTS.lockable}
AND EXISTS (SELECT 1 FROM kafka_parked p WHERE p.topic = i.topic AND p.state = 1 AND p.retry_at <= clock_timestamp())"""

_TOPICS_IN_USE = """\
WITH RECURSIVE found(topic) AS (
    (SELECT topic FROM kafka_messages ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT m.topic FROM kafka_messages m WHERE m.topic > found.topic ORDER BY m.topic LIMIT 1)
    FROM found WHERE found.topic IS NOT NULL
)
SELECT topic FROM found WHERE topic IS NOT NULL"""


class PostgresOutboxStore(OperatedOutboxStore):
    """One connection in autocommit. Only what must not be lost waits for the disk: the opening of a session."""

    dialect = "postgresql"

    def __init__(
        self, connection: psycopg.Connection[Any], floors: Floors, *, lock_limit_ms: int, hold_parked: bool
    ) -> None:
        super().__init__(_STATEMENTS, lock_limit_ms=lock_limit_ms, hold_parked=hold_parked)
        self._connection = connection
        self._floors = floors
        with _translated():
            found = connection.execute("SHOW synchronous_commit").fetchone()
            self._durable = found[0] if found and found[0] != "off" else "on"
            connection.execute("SET synchronous_commit TO off")
            # A relay that stops in the middle of a transaction must not keep the topic's row locked.
            connection.execute(f"SET idle_in_transaction_session_timeout TO {max(lock_limit_ms, 1)}")

    def create_tables(self) -> None:
        with self._transaction(durable=True):
            for statement in create_statements("postgresql"):
                self._connection.execute(statement)

    def topics_waiting(self) -> list[str]:
        topics, floors, rewinds = self._floors.known()
        limits = (self._lock_limit_ms, self._lock_limit_ms)
        return [topic for (topic,) in self._rows(_TOPICS, (topics, floors, rewinds, *limits))]

    def _topics_in_use(self) -> list[str]:
        return [topic for (topic,) in self._rows(_TOPICS_IN_USE)]

    def close(self) -> None:
        self._connection.close()

    # ---- the driver's primitives

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        with _translated():
            return self._connection.execute(sql, parameters or None).fetchall()

    def _run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        with _translated():
            return self._connection.execute(sql, parameters or None).rowcount

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        with _translated(), self._connection.transaction():
            if durable:
                self._connection.execute(f"SET LOCAL synchronous_commit TO {self._durable}")
            yield

    def _uuid(self, value: bytes | None) -> UUID | None:
        return None if value is None else UUID(bytes=value)

    def _select(self, hold: Hold, limit: BatchLimit, rewinds: int) -> list[Waiting]:
        floor = self._floors.of(hold.topic, rewinds)
        xmin = self._rows(_XMIN)[0][0]
        with _translated(), self._connection.cursor(binary=True) as cursor:
            cursor.execute(_STATEMENTS.batch, (hold.topic, floor.at, limit.rows, limit.size_bytes))
            rows = [Waiting(*row) for row in cursor]
        xmax = self._rows(_XMAX)[0][0]
        # A batch cut by its size is taken for a full one: more rows may lie behind it.
        cut = sum(len(row.payload or b"") for row in rows) >= limit.size_bytes
        floor.saw([row.id for row in rows], full=cut or len(rows) >= limit.rows, xmin=xmin, xmax=xmax)
        return rows


class PostgresOutboxDatabase:
    """Opens connections to one database."""

    def __init__(self, url: str, *, lock_limit_ms: int, hold_parked: bool) -> None:
        self._url = plain_url(url)
        self._lock_limit_ms = lock_limit_ms
        self._hold_parked = hold_parked
        self._floors = Floors()

    def connect(self) -> PostgresOutboxStore:
        self._floors.forget()  # the database may have been restored meanwhile
        return PostgresOutboxStore(
            self._open("tidebook-outbox"),
            self._floors,
            lock_limit_ms=self._lock_limit_ms,
            hold_parked=self._hold_parked,
        )

    def listen(self) -> PostgresListener:
        with _translated():
            return PostgresListener(self._open("tidebook-outbox-listener"))

    def _open(self, name: str) -> psycopg.Connection[Any]:
        with _translated():
            return psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_S_MAX,
                application_name=name,
                options=f"-c lock_timeout={LOCK_MS_MAX}",
                keepalives_idle=15,
                keepalives_interval=5,
                keepalives_count=3,
                prepare_threshold=2,
            )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error) from error


def translate(error: psycopg.Error) -> TidebookError:
    """What psycopg reports, as Tidebook's own error. A commit whose outcome is unknown is safe: the next hold looks."""
    told = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn):
        return Unavailable(f"the outbox's tables are missing or old ({told}): run 'tidebook outbox migrate'")
    if isinstance(error, errors.InvalidPassword | errors.InvalidCatalogName | errors.InsufficientPrivilege):
        return InvalidInput(f"PostgreSQL refused: {told}: check the URL and the rights of its user")
    return Unavailable(f"PostgreSQL: {told}")
