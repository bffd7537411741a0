"""Rows that several events share, where one of them goes and the others stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

import msgspec

from tidebook.core.key import Key
from tidebook.core.mend import Mend
from tidebook.core.replication import ClearEvents, EventRow, PutEvents, SliceWrites
from tidebook.core.segments import event_segment
from tidebook.store.cassandra.concurrently import each
from tidebook.store.cassandra.rows import EVENTS_A_ROW_MAX, decode_rows, is_shared
from tidebook.store.cassandra.scan import EventPages

#: Rows that a mend looks through at once.
PAGE_ROWS: Final = 100


class Apart(msgspec.Struct, frozen=True, gc=False):
    """Of the rows that a mend reaches into: their other events, and the numbers of the rows."""

    beside: tuple[EventRow, ...] = ()
    lasts: frozenset[int] = frozenset()


async def apart(pages: EventPages, mend: Mend) -> Apart:
    """What a mend has to write anew because it shares rows with what is mended."""
    numbers = {*mend.extra_rows, *(row.seq_nr for row in mend.rows)}
    size = mend.head.segment_size
    beside: list[EventRow] = []
    lasts: set[int] = set()
    for segment, of_segment in groupby(sorted(numbers), key=lambda number: event_segment(number, size)):
        some = list(of_segment)
        after = some[0] - 1
        while cells := await pages.cells(mend.key, segment, after=after, to=some[-1], limit=PAGE_ROWS):
            for cell in cells:
                rows = decode_rows([cell])
                after = rows[-1].seq_nr
                if is_shared(cell) and not numbers.isdisjoint(row.seq_nr for row in rows):
                    lasts.add(after)
                    beside += (row for row in rows if row.seq_nr not in numbers)
    return Apart(tuple(beside), frozenset(lasts))


async def rows_cut(pages: EventPages, writes: SliceWrites, *, at_once: int) -> Mapping[Key, Sequence[EventRow]]:
    """What deletes leave of the rows that they reach into, by journal."""
    found: dict[Key, Sequence[EventRow]] = {}
    cuts = [
        (write, [put for put in of_key if isinstance(put, PutEvents)])
        for of_key in writes.keys
        for write in of_key
        if isinstance(write, ClearEvents) and 0 < write.head.delete_to < write.head.seq_nr
    ]

    async def look(cut: tuple[ClearEvents, list[PutEvents]]) -> None:
        write, puts = cut
        head, to = write.head, write.head.delete_to
        segment = event_segment(to, head.segment_size)
        # Either lies there, or comes with this slice; what another replicator wrote of it meanwhile is the same.
        cells = await pages.cells(write.key, segment, after=to, to=to, limit=1)
        for rows in (decode_rows(cells), _of_slice(puts, to)):
            if rows and _reached_into(rows[0], to) and head.incarnation <= rows[0].position <= head.position:
                left = [row for row in rows if row.seq_nr > to]
                if event_segment(left[0].seq_nr, head.segment_size) == segment:
                    found[write.key] = left

    await each(look, cuts, at_once=at_once)
    return found


def _of_slice(puts: Sequence[PutEvents], to: int) -> list[EventRow]:
    """The rows of a slice that follow a delete and may share a row with what it deletes."""
    if not puts:
        return []
    rows = [row for row in puts[-1].rows if to < row.seq_nr < to + EVENTS_A_ROW_MAX]
    return [row for row in rows if row.position == rows[0].position and _part(row) == _part(rows[0])]


def _part(row: EventRow) -> int:
    return row.index // EVENTS_A_ROW_MAX


def _reached_into(first: EventRow, to: int) -> bool:
    """Whether a row begins with what is deleted, or did so: whoever folded less may write it whole, and late."""
    return first.seq_nr <= to or (first.seq_nr == to + 1 and first.index % EVENTS_A_ROW_MAX > 0)
