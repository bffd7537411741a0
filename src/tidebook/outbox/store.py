"""The relay's operations on the outbox's tables, over one connection; each database adds only a few primitives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from tidebook.core.errors import Fenced, NotFound, Unavailable
from tidebook.outbox import port
from tidebook.outbox.fence import Fence
from tidebook.outbox.message import Message
from tidebook.outbox.migrations.tables import VERSION, create_statements
from tidebook.outbox.scan_floor import ScanFloors
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.sql import (
    SQL,
    Dialect,
    SqlStatement,
    StoreStatements,
    id_condition,
    pack_ids,
    publish_statements,
    unpack_ids,
)

Row = Sequence[Any]

_REFUSED = f"{port.ParkedState.RETRYING:d}, {port.ParkedState.PARKED:d}"


class Result(Protocol):
    """The result of a statement; in a pipeline, it is fetched some time after the statement was sent."""

    def fetchall(self) -> Sequence[Row]:
        """Return the rows."""


class OutboxListener(Protocol):
    """Wakes a relay after a commit, on databases that can notify."""

    def asleep(self, relay: bytes, seconds: float) -> None:
        """Ask publishers to notify this relay for this many seconds; 0 withdraws the request."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notification; return False on timeout."""

    def close(self) -> None:
        """Stop listening."""


class OutboxDatabase(Protocol):
    """Opens connections, one per thread."""

    def connect(self) -> OutboxStore:
        """Open a connection for the calling thread."""

    def listen(self) -> OutboxListener | None:
        """Open a listener; return None if the database cannot notify, so that the relay has to poll."""
        return None


class OutboxStore(ABC):
    """One connection, used by one thread. Raises Unavailable on failure, and Fenced if the topic's lock is lost."""

    dialect: ClassVar[Dialect]

    def __init__(self, settings: OutboxSettings, floors: ScanFloors | None = None) -> None:
        self._sql = StoreStatements(SQL[self.dialect])
        self._lock_limit_ms = settings.lock_limit_ms
        self._hold_parked = settings.parked == "hold_key"
        self._floors = floors or ScanFloors()
        self._known_topics: set[str] = set()

    # ---- primitives of the driver

    @abstractmethod
    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Result:
        """Run a statement; in a pipeline, it is only sent, and fetching its result waits for it."""

    @abstractmethod
    def _transaction(self, *, durable: bool) -> AbstractContextManager[None]:
        """Return a write transaction; if `durable`, its commit returns only when it cannot be lost."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def _uuid(self, value: bytes) -> Any:
        """Convert 16 bytes to the type that the driver expects for a uuid."""
        return value

    def _ids(self, ids: Sequence[int]) -> SqlStatement:
        """Return a condition that is true for exactly these ids."""
        return id_condition(sorted(ids))

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> Sequence[Row]:
        return self._execute(sql, parameters).fetchall()

    # ---- tables, and publishing without a caller's transaction

    def create_tables(self) -> None:
        """Create the missing tables."""
        with self._transaction(durable=True):
            for statement in create_statements(self.dialect):
                self._execute(statement)

    def identity(self) -> bytes:
        """Return the outbox's uuid, 16 bytes; raise Unavailable if its tables have another version."""
        rows = self._rows(self._sql.identity)
        if rows and rows[0][1] == VERSION:
            return _bytes(rows[0][0])
        found = f"version {rows[0][1]}" if rows else "an empty kafka_outbox"
        raise Unavailable(
            f"the outbox's tables have {found}, this Tidebook needs version {VERSION}: run the migrations"
        )

    def publish(self, messages: Sequence[Message], *, ordered: bool) -> None:
        """Publish the messages in a separate transaction."""
        with self._transaction(durable=True):
            for statement in publish_statements(self.dialect, "format", messages, ordered=ordered):
                self._execute(*statement)

    # ---- the lock of a topic

    def topics_waiting(self) -> list[str]:
        """Return the topics with messages to relay that are neither locked nor resting."""
        limits = (self._lock_limit_ms, self._lock_limit_ms)
        return [str(topic) for (topic,) in self._rows(self._sql.topics_waiting, limits)]

    def try_lock(self, topic: str, *, lock_id: bytes, owner: str, retake: bytes | None = None) -> port.TopicLock | None:
        """Lock the topic with one guarded UPDATE and return the lock; None if another relay holds it.

        `retake` is the id of an earlier lock of this relay whose outcome is unknown: it is taken over.
        """
        if topic not in self._known_topics:
            self._execute(self._sql.add_topic, (topic,))
            self._known_topics.add(topic)
        uuid = self._uuid(lock_id)
        with self._transaction(durable=False):
            self._execute(self._sql.lock, (uuid, owner, topic, self._lock_limit_ms, self._uuid(retake or lock_id)))
            state = self._execute(self._sql.lock_state, (topic, uuid))
        rows = state.fetchall()
        if not rows:
            return None
        previous, session_id, session_ids, age_ms, fence, topic_uuid, cause, text = rows[0]
        open_session = None
        if session_id is not None:
            offsets = {int(p): int(o) for p, o in self._rows(self._sql.offsets, (topic,))}
            ids = frozenset(unpack_ids(bytes(session_ids)))
            open_session = port.RelaySession(_bytes(session_id), ids, int(age_ms), Fence(fence), topic_uuid, offsets)
        notice = port.Notice(port.NoticeCause(cause), text) if cause is not None else None
        return port.TopicLock(topic, lock_id, owner, previous, open_session, notice)

    def heartbeat(self, lock: port.TopicLock) -> None:
        """Renew the lock; raise Fenced if it is lost."""
        self.delete_sent(lock, ())

    def unlock(self, lock: port.TopicLock) -> None:
        """Release the lock without an error; an open session stays open. Do nothing if the lock is lost."""
        self._execute(self._sql.unlock, (lock.topic, self._uuid(lock.uuid)))

    def rest(self, lock: port.TopicLock, *, reason: str, rest_ms: int, failed: bool = True) -> None:
        """Release the lock and keep relays from the topic for `rest_ms`; with `failed`, count a retry.

        Do nothing if the lock is lost.
        """
        self._execute(self._sql.rest, (int(failed), rest_ms, reason[:2000], lock.topic, self._uuid(lock.uuid)))

    def notice(self, topic: str, notice: port.Notice | None) -> None:
        """Store why exactly once does not hold for the topic; None clears it."""
        cause, text = (notice.cause.value, notice.text) if notice is not None else (None, None)
        self._execute(self._sql.notice, (cause, text, topic))

    # ---- batches

    def begin(
        self,
        lock: port.TopicLock,
        session: port.NewSession,
        select: port.SelectBatch,
        limit: port.BatchLimit,
        sent: Sequence[int] = (),
    ) -> port.MessageBatch:
        """Delete the sent messages and open the next session, in one durable transaction.

        If there is nothing to send, the session is not opened and the batch is empty. Raise Fenced if the lock is lost.
        """
        topic = lock.topic
        with self._transaction(durable=True):
            guard = self._guard(lock)
            self._delete_sent(lock, sent)
            floor = self._floors.of(topic)
            found = self._execute(self._sql.batch, (topic, floor.at, limit.rows, limit.size_bytes))
            rewinds, xmin, xid, has_parked = _held_row(lock, guard)
            held_keys: set[bytes] = set()
            if has_parked:
                held_keys = self._held_keys(topic)
                rewinds = int(self._rows(self._sql.rewinds, (topic,))[0][0])
            if has_parked or floor.rewinds != rewinds:
                floor = self._floors.of(topic, rewinds)
                found = self._execute(self._sql.batch, (topic, floor.at, limit.rows, limit.size_bytes))
            rows = [port.WaitingMessage(*row) for row in found.fetchall()]
            selection = select(rows, frozenset(held_keys))
            if session.ends:
                placeholders = ", ".join(["(%s, %s, %s)"] * len(session.ends))
                offsets = [value for offset in sorted(session.ends.items()) for value in (topic, *offset)]
                self._execute(self._sql.put_offsets.format(placeholders), offsets)
            self._park(topic, selection.park)
            opened = self._open_session(lock, session, [row.id for row in selection.send], len(sent))
        opened_ms = int(opened.fetchall()[0][0]) if opened is not None else 0
        more = _more_waits(rows, selection, limit)
        floor.advance([row.id for row in rows], full=more, xmin=xmin, xid=xid)
        return port.MessageBatch(session.uuid, selection.send, opened_ms, more, len(selection.park))

    def finish(self, lock: port.TopicLock, sent: Sequence[int], *, unlock: bool) -> None:
        """Delete the sent messages and close the session; raise Fenced if the lock is lost.

        The commit need not be durable: if it is lost, the next relay's scan finds the messages in the log.
        """
        self._delete_and_update(lock, sent, self._sql.close_and_unlock if unlock else self._sql.close_session)

    def delete_sent(self, lock: port.TopicLock, sent: Sequence[int]) -> None:
        """Delete the sent messages and leave the session open for the others; raise Fenced if the lock is lost."""
        self._delete_and_update(lock, sent, self._sql.renew)

    def open_rows(self, lock: port.TopicLock, session: port.RelaySession) -> tuple[port.WaitingMessage, ...]:
        """Return the rows of an open session that still wait, by id; raise Fenced if the lock is lost."""
        if not session.ids:
            return ()
        condition, ids = self._ids(sorted(session.ids))
        with self._transaction(durable=False):
            _held_row(lock, self._guard(lock))
            rows = self._rows(self._sql.open_rows.format(condition), (lock.topic, *ids))
        return tuple(port.WaitingMessage(*row) for row in rows)

    def park(self, lock: port.TopicLock, decisions: Sequence[port.ParkingDecision]) -> None:
        """Park messages that are not in the log; raise Fenced if the lock is lost."""
        with self._transaction(durable=True):
            _held_row(lock, self._guard(lock))
            self._park(lock.topic, decisions)

    def _guard(self, lock: port.TopicLock) -> Result:
        """Lock the topic's row for this transaction; the result has a row if the relay still holds the lock."""
        return self._execute(self._sql.guard, (lock.topic, self._uuid(lock.uuid)))

    def _delete_and_update(self, lock: port.TopicLock, sent: Sequence[int], update: str) -> None:
        """Delete sent messages and update the topic's row; if the lock is lost, do neither and raise Fenced."""
        with self._transaction(durable=False):
            guard = self._guard(lock)
            self._delete_sent(lock, sent)
            self._execute(update, (len(sent), len(sent), lock.topic, self._uuid(lock.uuid)))
        _held_row(lock, guard)

    def _delete_sent(self, lock: port.TopicLock, sent: Sequence[int]) -> None:
        if sent:
            condition, ids = self._ids(sent)
            parameters = (lock.topic, *ids, lock.topic, self._uuid(lock.uuid))
            self._execute(self._sql.delete_sent.format(condition), parameters)

    def _open_session(
        self, lock: port.TopicLock, session: port.NewSession, ids: Sequence[int], sent_count: int
    ) -> Result | None:
        """Open the session and return its time; if there is nothing to send, close the last one and return None."""
        ended = (sent_count, sent_count, lock.topic, self._uuid(lock.uuid))
        if not ids:
            self._execute(self._sql.close_session, ended)
            return None
        opened = (self._uuid(session.uuid), pack_ids(ids), session.fence.value, session.topic_uuid)
        self._execute(self._sql.open_session, (*opened, *ended))
        return self._execute(self._sql.opened_at, (lock.topic,))

    # ---- parked messages

    def _held_keys(self, topic: str) -> set[bytes]:
        """Move messages whose retry is due back to `kafka_messages`, then return the order keys that are still held."""
        due = self._rows(self._sql.due, (topic,))
        self._unpark(topic, [int(id) for id, _ in due], {_bytes(key) for _, key in due if key is not None}, "tries")
        holding = _REFUSED if self._hold_parked else f"{port.ParkedState.RETRYING:d}"
        heads = self._rows(self._sql.parked_heads.format(holding), (topic,))
        return {_bytes(key) for _, key in heads if key is not None}

    def _park(self, topic: str, decisions: Sequence[port.ParkingDecision]) -> None:
        if held := [each.id for each in decisions if each.state is port.ParkedState.HELD]:
            self._move_to_parked(
                topic, held, (port.ParkedState.HELD, 0, "an earlier message of its key is parked", None)
            )
        for each in decisions:
            if each.state is not port.ParkedState.HELD:
                self._move_to_parked(topic, [each.id], (each.state, each.tries, each.reason, each.retry_ms))
            if each.state is port.ParkedState.PARKED and not self._hold_parked and each.order_key is not None:
                self._unpark(topic, [], {each.order_key}, "tries")

    def _move_to_parked(self, topic: str, ids: Sequence[int], values: tuple[int, int, str, int | None]) -> None:
        condition, parameters = self._ids(ids)
        self._execute(self._sql.park.format(condition), (*values, topic, *parameters))
        self._execute(self._sql.delete.format(condition), (topic, *parameters))

    def _unpark(self, topic: str, ids: Sequence[int], keys: set[bytes], tries: str) -> None:
        """Move rows, and those held by their keys, back to `kafka_messages` with their old ids.

        Increment the topic's `rewinds`, which invalidates scan floors above these ids.
        """
        returned = set(ids)
        for key in keys:
            returned |= {int(id) for (id,) in self._rows(self._sql.held_by, (topic, key))}
        if returned:
            condition, parameters = self._ids(sorted(returned))
            self._execute(self._sql.unpark.format(condition, tries), (topic, *parameters))
            self._execute(self._sql.delete_parked.format(condition), (topic, *parameters))
            self._execute(self._sql.rewind, (topic,))

    def parked(self, topic: str | None, *, limit: int) -> list[port.ParkedMessage]:
        """Return the messages in `kafka_parked`, by topic and id."""
        where, parameters = ("WHERE topic = %s", (topic, limit)) if topic is not None else ("", (limit,))
        return [port.ParkedMessage(*row) for row in self._rows(self._sql.parked.format(where), parameters)]

    def parked_retry(self, topic: str, id: int | None) -> int:
        """Move parked messages (all of the topic, or one) and those held by them back to `kafka_messages`.

        Return how many parked ones were moved.
        """
        with self._transaction(durable=True):
            found = self._parked_heads(topic, id)
            self._unpark(topic, list(found), {key for key in found.values() if key is not None}, "0")
        return len(found)

    def parked_drop(self, topic: str, id: int | None) -> int:
        """Delete parked messages and move those held by them back; return how many were deleted."""
        with self._transaction(durable=True):
            found = self._parked_heads(topic, id)
            for each in found:
                self._execute(self._sql.delete_parked.format("id = %s"), (topic, each))
            self._unpark(topic, [], {key for key in found.values() if key is not None}, "tries")
        return len(found)

    def _parked_heads(self, topic: str, id: int | None) -> dict[int, bytes | None]:
        """Return the messages that an operator may retry or drop, and lock the topic's row as relays do.

        If there is no such row, no relay has parked anything of the topic.
        """
        self._rows(self._sql.lock_topic, (topic,))
        heads = self._rows(self._sql.parked_heads.format(_REFUSED), (topic,))
        found = {int(each): None if key is None else _bytes(key) for each, key in heads}
        if id is None:
            return found
        if id not in found:
            raise NotFound(f"no message {id} of topic {topic!r} is parked: see 'tidebook outbox parked list'")
        return {id: found[id]}

    # ---- status

    def status(self, *, count_max: int) -> list[port.OutboxTopicStatus]:
        """Return the status of every topic that has waiting messages or was ever relayed."""
        infos = {str(row[0]): row[1:] for row in self._rows(self._sql.topic_infos)}
        parked: dict[str, dict[int, tuple[int, int]]] = {}
        for topic, state, count, age_ms in self._rows(self._sql.parked_counts):
            parked.setdefault(str(topic), {})[int(state)] = int(count), int(age_ms)
        in_use = [str(topic) for (topic,) in self._rows(self._sql.topics_in_use)]
        return [
            self._topic_status(name, infos.get(name), parked.get(name, {}), count_max)
            for name in sorted({*infos, *in_use, *parked})
        ]

    def _topic_status(
        self, topic: str, info: Row | None, parked: Mapping[int, tuple[int, int]], count_max: int
    ) -> port.OutboxTopicStatus:
        waiting = int(self._rows(self._sql.count, (topic, count_max))[0][0])
        ages_ms = [int(row[0]) for row in self._rows(self._sql.oldest, (topic,))]
        ages_ms += [parked[state][1] for state in (port.ParkedState.HELD, port.ParkedState.RETRYING) if state in parked]
        count = {state: parked[state][0] if state in parked else 0 for state in port.ParkedState}
        owner, locked_ms, error, retries, retry_ms, reason, cause, notice, notice_ms, dirty, relayed, minute = info or (
            *(None, None, 0, 0, None, None, None, None, None, 0, 0, 0),
        )
        return port.OutboxTopicStatus(
            topic=topic,
            waiting=waiting,
            waiting_is_bound=waiting >= count_max,
            oldest_age_ms=max(ages_ms, default=None),
            locked_by=owner,
            locked_age_ms=locked_ms,
            error=bool(error),
            retries=int(retries),
            retry_in_ms=retry_ms,
            reason=reason,
            notice=notice,
            notice_cause=port.NoticeCause(cause) if cause is not None else None,
            notice_age_ms=notice_ms if notice is not None else None,
            dirty=bool(dirty),
            relayed=int(relayed),
            per_minute=int(minute),
            parked=count[port.ParkedState.PARKED] + count[port.ParkedState.RETRYING],
            held=count[port.ParkedState.HELD],
        )


def _held_row(lock: port.TopicLock, guard: Result) -> Row:
    """Return the guard's row; raise Fenced if another relay has taken the lock."""
    rows = guard.fetchall()
    if not rows:
        raise Fenced(f"the lock of topic {lock.topic!r} was lost: another relay has taken it and continues")
    return rows[0]


def _more_waits(rows: Sequence[port.WaitingMessage], selection: port.BatchSelection, limit: port.BatchLimit) -> bool:
    """Return whether more rows may be waiting: the batch reached its limit, or left some rows out."""
    return (
        len(rows) >= limit.rows
        or len(selection.send) + len(selection.park) < len(rows)
        or sum(len(row.payload or b"") for row in rows) >= limit.size_bytes
    )


def _bytes(value: Any) -> bytes:
    """Return the bytes of a value that a driver returned as bytes or as a UUID."""
    return bytes(value.bytes) if hasattr(value, "bytes") else bytes(value)
