"""A page of a journal's event rows, and the check that it is consistent with the head it was read for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidebook.core.errors import Corrupt
from tidebook.core.event import ReadEvent, read_event
from tidebook.core.head import Head
from tidebook.core.replication_plan import EventRow


class EventPageOfStore:
    """All stored rows with after < seq_nr ≤ `reached`, in order."""

    __slots__ = ("_after", "_rows", "reached")

    def __init__(self, rows: Sequence[EventRow], *, after: int, to: int) -> None:
        self._rows = rows
        self._after = after
        self.reached = rows[-1].seq_nr if rows else to

    def is_gap_free(self, head: Head) -> bool:
        """Return whether these rows are provably the events that `head` describes.

        Within an incarnation a number is assigned once and its row never changes. So if there is one row of this
        incarnation for each number, the page is right whatever happened since, and the head need not be read again.
        """
        if self.reached - self._after != len(self._rows):
            return False
        low, high = head.incarnation, head.position
        return all(low <= row.position <= high for row in self._rows)

    def check(self, head: Head) -> None:
        """Raise Corrupt if a row is of another incarnation or newer than the head, which no interleaving can cause."""
        for row in self._rows:
            if not head.incarnation <= row.position <= head.position:
                raise Corrupt(
                    f"event {row.seq_nr} was written at {row.position}, outside the incarnation of its journal, from "
                    f"{head.incarnation} to {head.position}: run 'tidebook pipeline verify'"
                )

    def events(self, partition: int) -> Iterator[ReadEvent]:
        """Return the events, each decoded when it is requested."""
        for row in self._rows:
            yield read_event(row.kept, row.seq_nr, row.timestamp_ms, partition, row.position.offset)
