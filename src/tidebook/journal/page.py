"""A page of a journal's events, as the store had them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tidebook.core.errors import Corrupt
from tidebook.core.event import ReadEvent, read_event
from tidebook.core.head import Head
from tidebook.core.replication import EventRow


class Page:
    """Events in order, all that there are up to `reached`; each is decoded when it is wanted."""

    __slots__ = ("_ends", "events", "reached")

    def __init__(self, rows: Sequence[EventRow], partition: int, *, to: int) -> None:
        self.events: Iterable[ReadEvent] = read_rows(rows, partition)
        self._ends = (rows[0], rows[-1]) if rows else ()
        self.reached = self._ends[-1].seq_nr if self._ends else to

    def decode(self) -> None:
        """Decode all of it now, where there is nothing else to do meanwhile."""
        self.events = list(self.events)

    def cut(self, *, after: int, to: int) -> Page:
        """Keep the events with after < seq_nr ≤ to."""
        if self._ends and not (after < self._ends[0].seq_nr and self._ends[-1].seq_nr <= to):
            self.events = [event for event in self.events if after < event.seq_nr <= to]
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


def read_rows(rows: Iterable[EventRow], partition: int) -> Iterator[ReadEvent]:
    """The events of rows, as readers get them."""
    for row in rows:
        yield read_event(row.kept, row.seq_nr, row.timestamp_ms, partition, row.position.offset)
