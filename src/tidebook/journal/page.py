"""A page of a journal's events, as the store had them."""

from __future__ import annotations

from collections.abc import Sequence

from tidebook.core.errors import Corrupt
from tidebook.core.event import ReadEvent, decode_events, read_kept
from tidebook.core.head import Head
from tidebook.core.replication import EventRow


class Page:
    """Events in order, decoded; all that there are up to `reached`."""

    __slots__ = ("_ends", "events", "reached")

    def __init__(self, rows: Sequence[EventRow], partition: int, *, to: int) -> None:
        self.events = read_rows(rows, partition)
        self.reached = rows[-1].seq_nr if rows else to
        self._ends = (rows[0], rows[-1]) if rows else ()

    def cut(self, *, after: int, to: int) -> Page:
        """Keep the events with after < seq_nr ≤ to."""
        events = self.events
        if events and not (after < events[0].seq_nr and events[-1].seq_nr <= to):
            self.events = [event for event in events if after < event.seq_nr <= to]
        self.reached = min(self.reached, to)
        return self

    def check(self, head: Head) -> None:
        """An alarm, which no order of events should ever set off: a row of another life, or newer than its head."""
        for row in self._ends:
            if not head.incarnation <= row.position <= head.position:
                raise Corrupt(
                    f"event {row.seq_nr} was written at {row.position}, outside the life of its journal, from "
                    f"{head.incarnation} to {head.position}: run 'tidebook pipeline verify'"
                )


def read_rows(rows: Sequence[EventRow], partition: int) -> list[ReadEvent]:
    """The events of rows, as readers get them."""
    return [
        read_kept(event, row.seq_nr, row.timestamp_ms, partition, row.position.offset)
        for row, event in zip(rows, decode_events([row.kept for row in rows]), strict=True)
    ]
