"""The outbox on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.outbox.migrations.tables import create_statements
from tidebook.outbox.packed_ids import pack_ids
from tidebook.outbox.port import (
    BatchLimit,
    BatchSelection,
    MessageBatch,
    NewSession,
    SelectBatch,
    SentIds,
    TopicLock,
    WaitingMessage,
)
from tidebook.outbox.postgres import statements as sql
from tidebook.outbox.postgres.listener import PostgresListener
from tidebook.outbox.postgres.scan_floor import ScanFloors
from tidebook.outbox.sql_operation import OperatorOutboxStore
from tidebook.outbox.sql_store import Row, fenced, more_waits
from tidebook.postgres.connect import CONNECT_S_MAX, BoundedConnection, plain_url
from tidebook.postgres.errors import one_line

#: How long a statement may wait for a row that another transaction has locked.
LOCK_MS_MAX = 2_000


class PostgresOutboxStore(OperatorOutboxStore):
    """A connection in autocommit. Only opening a session waits for the disk."""

    dialect = "postgresql"

    def __init__(
        self, connection: psycopg.Connection[Any], floors: ScanFloors, *, lock_limit_ms: int, hold_parked: bool
    ) -> None:
        super().__init__(sql.STATEMENTS, lock_limit_ms=lock_limit_ms, hold_parked=hold_parked)
        self._connection = connection
        self._floors = floors
        with _translated():
            found = connection.execute("SHOW synchronous_commit").fetchone()
            if found and found[0] == "off":  # a session lost after its messages were sent would send them twice
                connection.execute("SET synchronous_commit TO on")
            # Every statement uses an index; stale statistics must not make the planner choose otherwise.
            for planner in ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit"):
                connection.execute(f"SET {planner} TO off")
            connection.execute("SET plan_cache_mode TO force_generic_plan")  # planning took longer than running
            # A relay that is stopped inside a transaction must not keep the topic's row locked.
            connection.execute(f"SET idle_in_transaction_session_timeout TO {max(lock_limit_ms, 1)}")

    def create_tables(self) -> None:
        with self._transaction(durable=True):
            for statement in create_statements("postgresql"):
                self._connection.execute(statement)

    def topics_waiting(self) -> list[str]:
        topics, floors, rewinds = self._floors.known()
        limits = (self._lock_limit_ms, self._lock_limit_ms)
        return [topic for (topic,) in self._rows(sql.TOPICS, (topics, floors, rewinds, *limits))]

    def _topics_in_use(self) -> list[str]:
        return [topic for (topic,) in self._rows(sql.TOPICS_IN_USE)]

    def close(self) -> None:
        self._connection.close()

    # ---- the shared methods, in fewer round trips

    def _lock_row(self, parameters: Sequence[Any], topic: str, lock_id: bytes) -> Row | None:
        rows = self._rows(sql.LOCK, parameters)
        return rows[0][:8] if rows else None

    def heartbeat(self, lock: TopicLock) -> None:
        if not self._rows(sql.HEARTBEAT, (lock.topic, self._uuid(lock.uuid))):
            raise fenced(lock)

    def finish(self, lock: TopicLock, sent: SentIds, *, unlock: bool) -> None:
        statement = sql.finish(one_run=_is_one_run(sent.ids), unlock=unlock)
        if not self._rows(statement, self._sent_parameters(lock, sent, {})):
            raise fenced(lock)

    def begin(
        self, lock: TopicLock, session: NewSession, select: SelectBatch, limit: BatchLimit, sent: SentIds | None = None
    ) -> MessageBatch:
        sent_ids = sent or SentIds([])
        # Two round trips: the guard with the waiting rows; then the session with its commit.
        with _translated(), self._connection.pipeline():
            with self._connection.transaction():
                guard = self._connection.execute(
                    sql.guard(one_run=_is_one_run(sent_ids.ids)),
                    self._sent_parameters(lock, sent_ids, session.ends or {}),
                )
                floor = self._floors.of(lock.topic)
                selected = self._select_batch(lock, limit, floor.at)
                held = guard.fetchone()
                if held is None:
                    raise fenced(lock)
                rewinds, xmin, xid, has_parked = held
                held_keys: set[bytes] = self._held_keys(lock.topic) if has_parked else set()
                if has_parked or floor.rewinds != rewinds:
                    floor = self._floors.of(lock.topic, self._rewinds(lock) if has_parked else rewinds)
                    selected = self._select_batch(lock, limit, floor.at)
                rows = [WaitingMessage(*row) for row in selected.fetchall()]
                selection = select(rows, frozenset(held_keys))
                if selection.park:
                    self._park(lock.topic, selection.park)
                opened = self._open_or_close_session(lock, session, selection, len(sent_ids.ids))
            ids = [row.id for row in rows]
            more = more_waits(rows, selection, limit)
            opened_ms = opened.fetchall()[0][0] if opened is not None else 0
        floor.advance(ids, full=more, xmin=xmin, xid=xid)
        return MessageBatch(session.uuid, selection.send, opened_ms, more, len(selection.park))

    def _open_or_close_session(
        self, lock: TopicLock, session: NewSession, selection: BatchSelection, sent_count: int
    ) -> Any:
        """Open the session and return a cursor with its time; close it and return None if there is nothing to send."""
        if not selection.send:
            self._connection.execute(
                sql.STATEMENTS.close_session, (sent_count, sent_count, lock.topic, self._uuid(lock.uuid))
            )
            return None
        ids = pack_ids([row.id for row in selection.send])
        opened = (self._uuid(session.uuid), ids, session.fence, session.topic_uuid, sent_count, sent_count, lock.topic)
        return self._connection.execute(sql.OPEN, opened)

    def _select_batch(self, lock: TopicLock, limit: BatchLimit, floor: int) -> Any:
        cursor = self._connection.cursor(binary=True)
        return cursor.execute(sql.STATEMENTS.batch, (lock.topic, floor, limit.rows, limit.size_bytes))

    def _sent_parameters(self, lock: TopicLock, sent: SentIds, offsets: Mapping[int, int]) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "topic": lock.topic,
            "lock_id": self._uuid(lock.uuid),
            "partitions": list(offsets),
            "offsets": list(offsets.values()),
            "sent_count": len(sent.ids),
        }
        if _is_one_run(sent.ids):
            return parameters | {"first": sent.ids[0], "last": sent.ids[-1]}
        return parameters | {"ids": list(sent.ids)}

    def _rewinds(self, lock: TopicLock) -> int:
        return int(self._rows("SELECT rewinds FROM kafka_topic_info WHERE topic = %s", (lock.topic,))[0][0])

    # ---- the driver's primitives

    def _rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        with _translated():
            return self._connection.execute(sql, parameters or None).fetchall()

    def _run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        with _translated():
            return self._connection.execute(sql, parameters or None).rowcount

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        with _translated(), self._connection.transaction():
            yield

    def _uuid(self, value: bytes | None) -> UUID | None:
        return None if value is None else UUID(bytes=value)

    def _select(self, lock: TopicLock, limit: BatchLimit, rewinds: int) -> list[WaitingMessage]:
        return [WaitingMessage(*row) for row in self._select_batch(lock, limit, 0).fetchall()]


def _is_one_run(ids: Sequence[int]) -> bool:
    """Return whether increasing ids are one run of consecutive ids."""
    return bool(ids) and ids[-1] - ids[0] == len(ids) - 1


class PostgresOutboxDatabase:
    """Opens connections to one database."""

    def __init__(self, url: str, *, lock_limit_ms: int, hold_parked: bool) -> None:
        self._url = plain_url(url)
        self._lock_limit_ms = lock_limit_ms
        self._hold_parked = hold_parked
        self._floors = ScanFloors()

    def connect(self) -> PostgresOutboxStore:
        connection = self._open("tidebook-outbox")
        with _translated():
            self._floors.reset_unless(connection.execute(sql.INCARNATION).fetchone())
        return PostgresOutboxStore(
            connection, self._floors, lock_limit_ms=self._lock_limit_ms, hold_parked=self._hold_parked
        )

    def listen(self) -> PostgresListener:
        with _translated():
            return PostgresListener(self._open("tidebook-outbox-listener"))

    def _open(self, name: str) -> psycopg.Connection[Any]:
        with _translated():
            return BoundedConnection.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_S_MAX,
                application_name=name,
                options=f"-c lock_timeout={LOCK_MS_MAX}",
                keepalives_idle=15,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=30_000,
                prepare_threshold=2,
            )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error) from error


def translate(error: psycopg.Error) -> TidebookError:
    """Return psycopg's error as Tidebook's. A commit with an unknown outcome is safe: the next lock resolves it."""
    text = one_line(error)
    if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn):
        return Unavailable(f"the outbox's tables are missing or old ({text}): run 'tidebook outbox migrate'")
    if isinstance(error, errors.InvalidPassword | errors.InvalidCatalogName | errors.InsufficientPrivilege):
        return InvalidInput(f"PostgreSQL refused: {text}: check the URL and the rights of its user")
    return Unavailable(f"PostgreSQL: {text}")
