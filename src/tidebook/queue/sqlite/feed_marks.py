"""Feed marks in SQLite: how far a source was put, moved in the transaction of the put."""

from __future__ import annotations

from collections.abc import Sequence

import apsw
import msgspec

from tidebook.queue.port import Put, QueueRef, Step
from tidebook.queue.sqlite.puts import NewEntries, insert
from tidebook.queue.sqlite.tables import channel_of
from tidebook.runtime.clock import Clock
from tidebook.sqlite.writer import WriteTransaction

_BEGIN = "INSERT INTO mark (queue, source, part, place) VALUES (?, ?, ?, ?)"
_MOVE = "UPDATE mark SET place = ? WHERE queue = ? AND source = ? AND part = ?"
_ALL = "SELECT part, place FROM mark WHERE queue = ? AND source = ?"


class PutOnce(msgspec.Struct, frozen=True, gc=False):
    """The arguments of one `put_once`: entries from a source, and the marks that move with them."""

    call: NewEntries
    source: str
    steps: Sequence[Step]


class SqliteFeedMarks:
    """Puts entries once per move of a mark."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def put(self, session: WriteTransaction, calls: Sequence[PutOnce]) -> list[Put | None]:
        """Move the marks and put the entries; return None for a call of which a mark has moved."""
        return [self._put(session, put_once) for put_once in calls]

    def _put(self, session: WriteTransaction, put_once: PutOnce) -> Put | None:
        connection, queue = session.connection, put_once.call.queue
        current = marks(connection, queue, put_once.source)
        if any(current.get(step.part) != step.before for step in put_once.steps):
            return None
        for part, before, after in put_once.steps:
            if before is None:
                connection.execute(_BEGIN, (queue.id, put_once.source, part, after))
            else:
                connection.execute(_MOVE, (after, queue.id, put_once.source, part))
        now_ms = self._clock.now_ms()
        if not put_once.call.entries:
            return Put(0, 0, now_ms)
        session.channels.add(channel_of(queue.id))
        return insert(connection, put_once.call, now_ms)


def marks(connection: apsw.Connection, queue: QueueRef, source: str) -> dict[int, str]:
    """Return the mark of each part of a source."""
    return dict(connection.execute(_ALL, (queue.id, source)).fetchall())  # type: ignore[arg-type]
