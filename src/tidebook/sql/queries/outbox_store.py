"""What every `OutboxStore` does, over a few primitives of its driver: run a statement, hold a transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tidebook.core.errors import Fenced, Unavailable
from tidebook.sql.port.outbox import (
    VERSION,
    Aside,
    Batch,
    BatchLimit,
    Choose,
    Chosen,
    Finished,
    Hold,
    NewSession,
    Session,
    SetAside,
    Waiting,
)
from tidebook.sql.port.outbox_ids import pack_ids, unpack_ids
from tidebook.sql.queries.outbox_relay import RelayStatements, id_condition, id_list

Row = Sequence[Any]


class SqlOutboxStore(ABC):
    """The relay's side of the outbox, in SQL."""

    def __init__(self, statements: RelayStatements, *, lock_limit_ms: int, hold_parked: bool) -> None:
        self._sql = statements
        self._lock_limit_ms = lock_limit_ms
        #: The states whose messages hold the others of their key.
        self._holding = id_list([Aside.RETRYING, Aside.PARKED] if hold_parked else [Aside.RETRYING])
        self._hold_parked = hold_parked
        self._known: set[str] = set()

    # ---- what a driver adds

    @abstractmethod
    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a query."""

    @abstractmethod
    def _run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it found."""

    @abstractmethod
    def _transaction(self, *, durable: bool) -> AbstractContextManager[None]:
        """A transaction that can write; `durable`: its commit returns only when it cannot be lost."""

    @abstractmethod
    def _uuid(self, value: bytes | None) -> Any:
        """16 bytes as the driver writes them."""

    @abstractmethod
    def _select(self, hold: Hold, limit: BatchLimit, rewinds: int) -> list[Waiting]:
        """The first waiting rows of a topic by id."""

    # ---- the lock

    def identity(self) -> bytes:
        """The outbox's uuid; its tables must be of the version that this Tidebook knows."""
        rows = self._rows(self._sql.identity)
        if not rows or rows[0][1] != VERSION:
            found = f"version {rows[0][1]}" if rows else "an empty kafka_outbox"
            raise Unavailable(f"the outbox's tables are of {found}, this Tidebook needs {VERSION}: run the migrations")
        return as_bytes(rows[0][0])

    def try_lock(self, topic: str, *, hold: bytes, owner: str, again: bytes | None = None) -> Hold | None:
        """One guarded UPDATE: rule 32."""
        if topic not in self._known:
            self._run(self._sql.add_topic, (topic,))
            self._known.add(topic)
        parameters = (self._uuid(hold), owner, topic, self._lock_limit_ms, self._uuid(again or hold))
        taken = self._take(parameters, topic, hold)
        if taken is None:
            return None
        previous, session_id, session_ids, age_ms, fence, topic_uuid, notice = taken
        dirty = None
        if session_id is not None:
            offsets = {int(p): int(o) for p, o in self._rows(self._sql.offsets, (topic,))}
            ids = unpack_ids(bytes(session_ids))
            dirty = Session(as_bytes(session_id), ids, int(age_ms), fence, topic_uuid, offsets)
        return Hold(topic, hold, owner, previous, dirty, notice)

    def _take(self, parameters: Sequence[Any], topic: str, hold: bytes) -> Row | None:
        """Run the guarded UPDATE; the row as it is then, if it was ours to take."""
        if self._run(self._sql.lock, parameters) != 1:
            return None
        rows = self._rows(self._sql.held, (topic, self._uuid(hold)))
        return rows[0] if rows else None

    def heartbeat(self, hold: Hold) -> None:
        """Keep the lock."""
        if self._run(self._sql.heartbeat, (hold.topic, self._uuid(hold.uuid))) != 1:
            raise fenced(hold)

    def unlock(self, hold: Hold) -> None:
        """Let go."""
        self._run(self._sql.unlock, (hold.topic, self._uuid(hold.uuid)))

    def rest(self, hold: Hold, *, reason: str, rest_ms: int, failed: bool = True) -> None:
        """Let go, and keep everybody off for a while."""
        self._run(self._sql.rest, (int(failed), rest_ms, reason[:2000], hold.topic, self._uuid(hold.uuid)))

    def notice(self, topic: str, text: str | None) -> None:
        """Write down what does not hold."""
        self._run(self._sql.notice, (text, topic))

    # ---- batches

    def begin(
        self, hold: Hold, session: NewSession, choose: Choose, limit: BatchLimit, finished: Finished | None = None
    ) -> Batch:
        """Finish, select, decide, open."""
        with self._transaction(durable=True):
            rewinds = self._guard(hold)
            if finished is not None:
                self._delete(hold.topic, finished)
            if session.ends:
                self._put_offsets(hold.topic, session.ends)
            heads = self._heads(hold.topic)
            rows = self._select(hold, limit, rewinds)
            chosen = choose(rows, frozenset(heads))
            self._move_aside(hold.topic, chosen.aside)
            done = len(finished.ids) if finished is not None else 0
            opened_ms = self._open(hold, session, [row.id for row in chosen.send], done)
        more = more_waits(rows, chosen, limit)
        return Batch(session.uuid, chosen.send, opened_ms, more, len(chosen.aside))

    def finish(self, hold: Hold, finished: Finished, *, unlock: bool) -> None:
        """A lost finish is found again by a scan, so that it need not be durable."""
        with self._transaction(durable=False):
            self._guard(hold)
            self._delete(hold.topic, finished)
            done = len(finished.ids)
            statement = self._sql.close_and_unlock if unlock else self._sql.close_session
            self._run(statement, (done, done, hold.topic, self._uuid(hold.uuid)))

    def open_rows(self, hold: Hold, session: Session) -> tuple[Waiting, ...]:
        """The rows that an open session still has."""
        if not session.ids:
            return ()
        with self._transaction(durable=False):
            self._guard(hold)
            rows = self._rows(self._sql.open_rows.format(id_condition(sorted(session.ids))), (hold.topic,))
        return tuple(Waiting(*row) for row in rows)

    def forget(self, hold: Hold, finished: Finished) -> None:
        """Delete some of a session's rows."""
        with self._transaction(durable=False):
            self._guard(hold)
            self._delete(hold.topic, finished)
            done = len(finished.ids)
            self._run(self._sql.count_more, (done, done, hold.topic))

    def set_aside(self, hold: Hold, aside: Sequence[SetAside]) -> None:
        """Take messages out of the way."""
        with self._transaction(durable=True):
            self._guard(hold)
            self._move_aside(hold.topic, aside)

    def _guard(self, hold: Hold) -> int:
        """The row is locked until the transaction ends, and the lock is ours: else nothing of it happens."""
        rows = self._rows(self._sql.guard, (hold.topic, self._uuid(hold.uuid)))
        if not rows:
            raise fenced(hold)
        return int(rows[0][0])

    def _open(self, hold: Hold, session: NewSession, ids: Sequence[int], done: int) -> int:
        if not ids:
            parameters = (done, done, hold.topic, self._uuid(hold.uuid))
            self._run(self._sql.close_session, parameters)
            return 0
        opened = (self._uuid(session.uuid), pack_ids(ids), session.fence, session.topic_uuid, done, done, hold.topic)
        self._run(self._sql.open_session, opened)
        return int(self._rows(self._sql.opened_at, (hold.topic,))[0][0])

    def _delete(self, topic: str, finished: Finished) -> None:
        if finished.ids:
            self._run(self._sql.delete.format(id_condition(sorted(finished.ids))), (topic,))

    def _put_offsets(self, topic: str, offsets: Mapping[int, int]) -> None:
        marks = ", ".join(["(%s, %s, %s)"] * len(offsets))
        values = [value for partition, offset in sorted(offsets.items()) for value in (topic, partition, offset)]
        self._run(self._sql.put_offsets.format(marks), values)

    # ---- what lies aside

    def _heads(self, topic: str) -> set[bytes]:
        """The order keys that are held; those whose rest is over go back first."""
        due = self._rows(self._sql.due, (topic,))
        if due:
            self._put_back(topic, [int(id) for id, _ in due], {as_bytes(k) for _, k in due if k is not None}, "tries")
        heads = self._rows(self._sql.heads.format(self._holding), (topic,))
        return {as_bytes(key) for _, key in heads if key is not None}

    def _move_aside(self, topic: str, aside: Sequence[SetAside]) -> None:
        held = [each.id for each in aside if each.state is Aside.HELD]
        if held:
            self._move(topic, held, (Aside.HELD, 0, "an earlier message of its key is parked", None))
        for each in aside:
            if each.state is not Aside.HELD:
                self._move(topic, [each.id], (each.state, each.tries, each.reason, each.retry_ms))
            if each.state is Aside.PARKED and not self._hold_parked and each.order_key is not None:
                self._put_back(topic, [], {each.order_key}, "tries")

    def _move(self, topic: str, ids: Sequence[int], values: tuple[int, int, str, int | None]) -> None:
        condition = id_condition(sorted(ids))
        self._run(self._sql.move_aside.format(condition), (*values, topic))
        self._run(self._sql.delete.format(condition), (topic,))

    def _put_back(self, topic: str, ids: Sequence[int], keys: set[bytes], tries: str) -> None:
        """Rows, and those held by their keys, with the ids they had; relays that look only behind these are told."""
        back = set(ids)
        for key in keys:
            back |= {int(id) for (id,) in self._rows(self._sql.held_by, (topic, key))}
        if back:
            condition = id_condition(sorted(back))
            self._run(self._sql.move_back.format(condition, tries), (topic,))
            self._run(self._sql.delete_aside.format(condition), (topic,))
            self._run(self._sql.rewind, (topic,))


def more_waits(rows: Sequence[Waiting], chosen: Chosen, limit: BatchLimit) -> bool:
    """Whether rows may wait behind a batch: it was cut by its limit, or left some of them."""
    return (
        len(rows) >= limit.rows
        or len(chosen.send) + len(chosen.aside) < len(rows)
        or sum(len(row.payload or b"") for row in rows) >= limit.size_bytes
    )


def as_bytes(value: Any) -> bytes:
    """Bytes, however the driver gives them."""
    return bytes(value.bytes) if hasattr(value, "bytes") else bytes(value)


def fenced(hold: Hold) -> Fenced:
    """The lock belongs to somebody else."""
    return Fenced(f"the lock of topic {hold.topic!r} was lost: another relay has it now, and goes on from here")
