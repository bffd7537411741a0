"""The relay's part of every SQL `OutboxStore`, over a few primitives of its driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tidebook.core.errors import Fenced, Unavailable
from tidebook.outbox.packed_ids import pack_ids, unpack_ids
from tidebook.outbox.port import (
    VERSION,
    BatchLimit,
    BatchSelection,
    MessageBatch,
    NewSession,
    Notice,
    NoticeCause,
    ParkedState,
    ParkingDecision,
    RelaySession,
    SelectBatch,
    SentIds,
    TopicLock,
    WaitingMessage,
)
from tidebook.outbox.sql_relay import RelayStatements, id_condition, id_list

Row = Sequence[Any]


class SqlOutboxStore(ABC):
    """The relay's side of the outbox, in SQL."""

    def __init__(self, statements: RelayStatements, *, lock_limit_ms: int, hold_parked: bool) -> None:
        self._sql = statements
        self._lock_limit_ms = lock_limit_ms
        #: The states whose messages hold later ones of their key.
        self._holding_states = id_list(
            [ParkedState.RETRYING, ParkedState.PARKED] if hold_parked else [ParkedState.RETRYING]
        )
        self._hold_parked = hold_parked
        self._known_topics: set[str] = set()

    # ---- primitives of the driver

    @abstractmethod
    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a query and return its rows."""

    @abstractmethod
    def _run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement and return how many rows it matched."""

    @abstractmethod
    def _transaction(self, *, durable: bool) -> AbstractContextManager[None]:
        """Return a write transaction; if `durable`, its commit returns only when it cannot be lost."""

    @abstractmethod
    def _uuid(self, value: bytes | None) -> Any:
        """Return 16 bytes as the driver writes a uuid."""

    @abstractmethod
    def _select(self, lock: TopicLock, limit: BatchLimit, rewinds: int) -> list[WaitingMessage]:
        """Return the first waiting rows of a topic, by id."""

    # ---- the lock

    def identity(self) -> bytes:
        """Return the outbox's uuid; raise Unavailable if its tables are of another version."""
        rows = self._rows(self._sql.identity)
        if not rows or rows[0][1] != VERSION:
            found = f"version {rows[0][1]}" if rows else "an empty kafka_outbox"
            raise Unavailable(
                f"the outbox's tables have {found}, this Tidebook needs version {VERSION}: run the migrations"
            )
        return as_bytes(rows[0][0])

    def try_lock(self, topic: str, *, lock_id: bytes, owner: str, retake: bytes | None = None) -> TopicLock | None:
        """Lock the topic with one guarded UPDATE: rule 32."""
        if topic not in self._known_topics:
            self._run(self._sql.add_topic, (topic,))
            self._known_topics.add(topic)
        parameters = (self._uuid(lock_id), owner, topic, self._lock_limit_ms, self._uuid(retake or lock_id))
        row = self._lock_row(parameters, topic, lock_id)
        if row is None:
            return None
        previous, session_id, session_ids, age_ms, fence, topic_uuid, cause, text = row
        open_session = None
        if session_id is not None:
            offsets = {int(p): int(o) for p, o in self._rows(self._sql.offsets, (topic,))}
            ids = unpack_ids(bytes(session_ids))
            open_session = RelaySession(as_bytes(session_id), ids, int(age_ms), fence, topic_uuid, offsets)
        notice = Notice(NoticeCause(cause), text) if cause is not None else None
        return TopicLock(topic, lock_id, owner, previous, open_session, notice)

    def _lock_row(self, parameters: Sequence[Any], topic: str, lock_id: bytes) -> Row | None:
        """Run the guarded UPDATE; return the topic's row if the lock was taken."""
        if self._run(self._sql.lock, parameters) != 1:
            return None
        rows = self._rows(self._sql.lock_state, (topic, self._uuid(lock_id)))
        return rows[0] if rows else None

    def heartbeat(self, lock: TopicLock) -> None:
        """Renew the lock; raise Fenced if it is lost."""
        if self._run(self._sql.heartbeat, (lock.topic, self._uuid(lock.uuid))) != 1:
            raise fenced(lock)

    def unlock(self, lock: TopicLock) -> None:
        """Release the lock."""
        self._run(self._sql.unlock, (lock.topic, self._uuid(lock.uuid)))

    def rest(self, lock: TopicLock, *, reason: str, rest_ms: int, failed: bool = True) -> None:
        """Release the lock and let no relay take the topic for `rest_ms`."""
        self._run(self._sql.rest, (int(failed), rest_ms, reason[:2000], lock.topic, self._uuid(lock.uuid)))

    def notice(self, topic: str, notice: Notice | None) -> None:
        """Store the topic's notice, or clear it."""
        cause, text = (notice.cause.value, notice.text) if notice is not None else (None, None)
        self._run(self._sql.notice, (cause, text, topic))

    # ---- batches

    def begin(
        self, lock: TopicLock, session: NewSession, select: SelectBatch, limit: BatchLimit, sent: SentIds | None = None
    ) -> MessageBatch:
        """Delete the sent messages, select the next ones, park some, and open the session."""
        with self._transaction(durable=True):
            rewinds = self._guard(lock)
            if sent is not None:
                self._delete_sent(lock.topic, sent)
            if session.ends:
                self._put_offsets(lock.topic, session.ends)
            held_keys = self._held_keys(lock.topic)
            rows = self._select(lock, limit, rewinds)
            selection = select(rows, frozenset(held_keys))
            self._park(lock.topic, selection.park)
            sent_count = len(sent.ids) if sent is not None else 0
            opened_ms = self._open_session(lock, session, [row.id for row in selection.send], sent_count)
        more = more_waits(rows, selection, limit)
        return MessageBatch(session.uuid, selection.send, opened_ms, more, len(selection.park))

    def finish(self, lock: TopicLock, sent: SentIds, *, unlock: bool) -> None:
        """Delete the sent messages and close the session; not durable, because a scan would find them again."""
        with self._transaction(durable=False):
            self._guard(lock)
            self._delete_sent(lock.topic, sent)
            sent_count = len(sent.ids)
            statement = self._sql.close_and_unlock if unlock else self._sql.close_session
            self._run(statement, (sent_count, sent_count, lock.topic, self._uuid(lock.uuid)))

    def open_rows(self, lock: TopicLock, session: RelaySession) -> tuple[WaitingMessage, ...]:
        """Return the rows of an open session that still wait."""
        if not session.ids:
            return ()
        with self._transaction(durable=False):
            self._guard(lock)
            rows = self._rows(self._sql.open_rows.format(id_condition(sorted(session.ids))), (lock.topic,))
        return tuple(WaitingMessage(*row) for row in rows)

    def delete_sent(self, lock: TopicLock, sent: SentIds) -> None:
        """Delete the sent messages and leave the session open."""
        with self._transaction(durable=False):
            self._guard(lock)
            self._delete_sent(lock.topic, sent)
            sent_count = len(sent.ids)
            self._run(self._sql.count_sent, (sent_count, sent_count, lock.topic))

    def park(self, lock: TopicLock, decisions: Sequence[ParkingDecision]) -> None:
        """Park messages."""
        with self._transaction(durable=True):
            self._guard(lock)
            self._park(lock.topic, decisions)

    def _guard(self, lock: TopicLock) -> int:
        """Lock the topic's row for this transaction and return its rewinds; raise Fenced if the lock is lost."""
        rows = self._rows(self._sql.guard, (lock.topic, self._uuid(lock.uuid)))
        if not rows:
            raise fenced(lock)
        return int(rows[0][0])

    def _open_session(self, lock: TopicLock, session: NewSession, ids: Sequence[int], sent_count: int) -> int:
        if not ids:
            parameters = (sent_count, sent_count, lock.topic, self._uuid(lock.uuid))
            self._run(self._sql.close_session, parameters)
            return 0
        opened = (
            self._uuid(session.uuid),
            pack_ids(ids),
            session.fence,
            session.topic_uuid,
            sent_count,
            sent_count,
            lock.topic,
        )
        self._run(self._sql.open_session, opened)
        return int(self._rows(self._sql.opened_at, (lock.topic,))[0][0])

    def _delete_sent(self, topic: str, sent: SentIds) -> None:
        if sent.ids:
            self._run(self._sql.delete.format(id_condition(sorted(sent.ids))), (topic,))

    def _put_offsets(self, topic: str, offsets: Mapping[int, int]) -> None:
        marks = ", ".join(["(%s, %s, %s)"] * len(offsets))
        values = [value for partition, offset in sorted(offsets.items()) for value in (topic, partition, offset)]
        self._run(self._sql.put_offsets.format(marks), values)

    # ---- parked messages

    def _held_keys(self, topic: str) -> set[bytes]:
        """Return the order keys that are held, after messages whose retry is due were moved back."""
        due = self._rows(self._sql.due, (topic,))
        if due:
            self._unpark(topic, [int(id) for id, _ in due], {as_bytes(k) for _, k in due if k is not None}, "tries")
        parked_heads = self._rows(self._sql.parked_heads.format(self._holding_states), (topic,))
        return {as_bytes(key) for _, key in parked_heads if key is not None}

    def _park(self, topic: str, decisions: Sequence[ParkingDecision]) -> None:
        held = [each.id for each in decisions if each.state is ParkedState.HELD]
        if held:
            self._move_to_parked(topic, held, (ParkedState.HELD, 0, "an earlier message of its key is parked", None))
        for each in decisions:
            if each.state is not ParkedState.HELD:
                self._move_to_parked(topic, [each.id], (each.state, each.tries, each.reason, each.retry_ms))
            if each.state is ParkedState.PARKED and not self._hold_parked and each.order_key is not None:
                self._unpark(topic, [], {each.order_key}, "tries")

    def _move_to_parked(self, topic: str, ids: Sequence[int], values: tuple[int, int, str, int | None]) -> None:
        condition = id_condition(sorted(ids))
        self._run(self._sql.park.format(condition), (*values, topic))
        self._run(self._sql.delete.format(condition), (topic,))

    def _unpark(self, topic: str, ids: Sequence[int], keys: set[bytes], tries: str) -> None:
        """Move rows, and those held by their keys, back to `kafka_messages` with their old ids.

        The topic's rewinds are counted, so that relays no longer scan only above these ids.
        """
        returned = set(ids)
        for key in keys:
            returned |= {int(id) for (id,) in self._rows(self._sql.held_by, (topic, key))}
        if returned:
            condition = id_condition(sorted(returned))
            self._run(self._sql.unpark.format(condition, tries), (topic,))
            self._run(self._sql.delete_parked.format(condition), (topic,))
            self._run(self._sql.rewind, (topic,))


def more_waits(rows: Sequence[WaitingMessage], selection: BatchSelection, limit: BatchLimit) -> bool:
    """Return whether rows may wait after a batch: it reached its limit, or left some rows out."""
    return (
        len(rows) >= limit.rows
        or len(selection.send) + len(selection.park) < len(rows)
        or sum(len(row.payload or b"") for row in rows) >= limit.size_bytes
    )


def as_bytes(value: Any) -> bytes:
    """Return bytes, in whichever type the driver returned them."""
    return bytes(value.bytes) if hasattr(value, "bytes") else bytes(value)


def fenced(lock: TopicLock) -> Fenced:
    """Return the error for a lock that another relay has taken."""
    return Fenced(f"the lock of topic {lock.topic!r} was lost: another relay has taken it and continues")
