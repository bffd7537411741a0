"""Marks in a folder: how far a source was put, moved in the transaction that puts."""

from __future__ import annotations

from collections.abc import Sequence

import apsw
import msgspec

from tidebook.core.clock import Clock
from tidebook.folder.writer import Session
from tidebook.sql.port.queue import Put, QueueRef, Step
from tidebook.sql.sqlite.queue_puts import NewEntries, insert
from tidebook.sql.sqlite.queue_tables import channel_of

_BEGIN = "INSERT INTO mark (queue, source, part, place) VALUES (?, ?, ?, ?)"
_MOVE = "UPDATE mark SET place = ? WHERE queue = ? AND source = ? AND part = ?"
_ALL = "SELECT part, place FROM mark WHERE queue = ? AND source = ?"


class Once(msgspec.Struct, frozen=True, gc=False):
    """Entries from a source, and the marks that move with them."""

    call: NewEntries
    source: str
    steps: Sequence[Step]


class Marks:
    """The table of marks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def put(self, session: Session, calls: Sequence[Once]) -> list[Put | None]:
        """Move the marks and put; None where a mark stood elsewhere."""
        return [self._put(session, once) for once in calls]

    def _put(self, session: Session, once: Once) -> Put | None:
        connection, queue = session.connection, once.call.queue
        standing = marks(connection, queue, once.source)
        if any(standing.get(step.part) != step.before for step in once.steps):
            return None
        for part, before, after in once.steps:
            if before is None:
                connection.execute(_BEGIN, (queue.id, once.source, part, after))
            else:
                connection.execute(_MOVE, (after, queue.id, once.source, part))
        now_ms = self._clock.now_ms()
        if not once.call.entries:
            return Put(0, 0, now_ms)
        session.channels.add(channel_of(queue.id))
        return insert(connection, once.call, now_ms)


def marks(connection: apsw.Connection, queue: QueueRef, source: str) -> dict[int, str]:
    """Where the parts of a source stand."""
    return dict(connection.execute(_ALL, (queue.id, source)).fetchall())  # type: ignore[arg-type]
