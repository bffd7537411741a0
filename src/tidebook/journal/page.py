"""A page of a journal's events, as the store had them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tidebook.core.errors import Corrupt
from tidebook.core.event import ReadEvent, read_event
from tidebook.core.head import Head
from tidebook.core.replication import EventRow


class Page:
    """Rows in order, all that there are behind `after` and up to `reached`."""

    __slots__ = ("_after", "_rows", "reached")

    def __init__(self, rows: Sequence[EventRow], *, after: int, to: int) -> None:
        self._rows = rows
        self._after = after
        self.reached = rows[-1].seq_nr if rows else to

    def proves_itself(self, head: Head) -> bool:
        """Whether these are the events that `head` speaks of, whatever has become of the journal meanwhile.

        Within a life a number is given once, and its row never changes. So a row of this life is the right one, and
        where there is one for each number nothing is missing: no look at the head after it could tell more.
        """
        if self.reached - self._after != len(self._rows):
            return False
        low, high = head.incarnation, head.position
        return all(low <= row.position <= high for row in self._rows)

    def check(self, head: Head) -> None:
        """An alarm, which no order of events should ever set off: a row of another life, or newer than its head."""
        for row in self._rows:
            if not head.incarnation <= row.position <= head.position:
                raise Corrupt(
                    f"event {row.seq_nr} was written at {row.position}, outside the life of its journal, from "
                    f"{head.incarnation} to {head.position}: run 'tidebook pipeline verify'"
                )

    def events(self, partition: int) -> Iterator[ReadEvent]:
        """The events as readers get them, each decoded when it is wanted."""
        return read_rows(self._rows, partition)


def read_rows(rows: Iterable[EventRow], partition: int) -> Iterator[ReadEvent]:
    """The events of rows, as readers get them."""
    for row in rows:
        yield read_event(row.kept, row.seq_nr, row.timestamp_ms, partition, row.position.offset)
