"""Convert the repair of a journal into batches of statements.

All of them have the stamp of the pointer, not of the records. A repair therefore overrules all that was replicated up
to the pointer and, by its revision, earlier repairs; everything that is replicated later overrules it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

import msgspec

from tidebook.core.buckets import Buckets
from tidebook.core.key import Key
from tidebook.core.position import tombstone_stamp, write_stamp
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import ClearEvents, EventRow, PutEvents, PutHead, PutTags, SliceWrites
from tidebook.core.segments import event_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import (
    Batch,
    CqlStatement,
    event_batches,
    head_batches,
    repair_segments,
    segment_batches,
)
from tidebook.store.cassandra.rows import EVENTS_PER_ROW_MAX, decode_rows, is_packed
from tidebook.store.cassandra.scan import EventPages
from tidebook.store.cassandra.session import run_bounded
from tidebook.store.cassandra.tag_writes import clear_batches, tag_batches

#: How many rows a repair reads per request.
PAGE_ROWS: Final = 100


class SplitRows(msgspec.Struct, frozen=True, gc=False):
    """The packed rows that a repair affects: their other events, and the numbers of the rows."""

    others: tuple[EventRow, ...] = ()
    row_numbers: frozenset[int] = frozenset()


async def split_packed_rows(pages: EventPages, repair: Repair) -> SplitRows:
    """Return the events and rows that a repair must rewrite because they share packed rows with repaired events."""
    numbers = {*repair.extra_rows, *(row.seq_nr for row in repair.rows)}
    size = repair.head.segment_size
    others: list[EventRow] = []
    # A row that cannot be decoded may be a packed row, so it is replaced last too.
    row_numbers: set[int] = numbers & repair.damaged_rows
    for segment, of_segment in groupby(sorted(numbers), key=lambda number: event_segment(number, size)):
        in_segment = list(of_segment)
        for after, to in _around(repair.damaged_rows, in_segment[0] - 1, in_segment[-1]):
            while cells := await pages.cells(repair.key, segment, after=after, to=to, limit=PAGE_ROWS):
                for cell in cells:
                    rows = decode_rows([cell])
                    after = rows[-1].seq_nr
                    if is_packed(cell) and not numbers.isdisjoint(row.seq_nr for row in rows):
                        row_numbers.add(after)
                        others += (row for row in rows if row.seq_nr not in numbers)
    return SplitRows(tuple(others), frozenset(row_numbers))


def _around(damaged: Iterable[int], after: int, to: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges to read between damaged rows, which cannot be decoded and are rewritten anyway.

    `cells` also returns rows that extend beyond the end of a range, so each range ends well before the damaged row.
    """
    for number in sorted(damaged):
        if after < number <= to + EVENTS_PER_ROW_MAX - 1:
            yield after, number - EVENTS_PER_ROW_MAX
            after = number
    yield after, to


async def rows_after_delete(
    pages: EventPages, writes: SliceWrites, *, at_once: int
) -> Mapping[Key, Sequence[EventRow]]:
    """Return, by journal, the remaining events of packed rows that a delete covers only in part."""
    found: dict[Key, Sequence[EventRow]] = {}
    deletes = [
        (write, [put for put in of_key if isinstance(put, PutEvents)])
        for of_key in writes.keys
        for write in of_key
        if isinstance(write, ClearEvents) and 0 < write.head.delete_to < write.head.seq_nr
    ]

    async def read_row(delete: tuple[ClearEvents, list[PutEvents]]) -> None:
        write, puts = delete
        head, to = write.head, write.head.delete_to
        segment = event_segment(to, head.segment_size)
        # The row is in the store or part of this slice. Another replicator would have written the same events.
        cells = await pages.cells(write.key, segment, after=to, to=to, limit=1)
        for rows in (decode_rows(cells), _slice_rows(puts, to)):
            if rows and _is_partly_deleted(rows[0], to) and head.incarnation <= rows[0].position <= head.position:
                left = [row for row in rows if row.seq_nr > to]
                if event_segment(left[0].seq_nr, head.segment_size) == segment:
                    found[write.key] = left

    await run_bounded(read_row, deletes, at_once=at_once)
    return found


def _slice_rows(puts: Sequence[PutEvents], to: int) -> list[EventRow]:
    """Return the events of a slice after number `to` that may share a packed row with deleted ones."""
    rows = [row for put in puts[-1:] for row in put.rows if to < row.seq_nr < to + EVENTS_PER_ROW_MAX]
    return [row for row in rows if row.position == rows[0].position and _row_index(row) == _row_index(rows[0])]


def _row_index(row: EventRow) -> int:
    return row.index // EVENTS_PER_ROW_MAX


def _is_partly_deleted(first: EventRow, to: int) -> bool:
    """Return whether a packed row begins with deleted events, or did before an earlier delete.

    A replicator that has folded less may still write the whole row, late.
    """
    return first.seq_nr <= to or (first.seq_nr == to + 1 and first.index % EVENTS_PER_ROW_MAX > 0)


def repair_rounds(repair: Repair, segments: int, buckets: Buckets, split_rows: SplitRows) -> Iterator[Iterator[Batch]]:
    """Yield all batches of a repair, in rounds. Each round is acknowledged before the next.

    Repaired events get separate rows, and so do the events that shared a packed row with them. A packed row is
    replaced last, when all of its events are elsewhere: its number is that of its last event.
    """
    stamp = write_stamp(repair.pointer.position, rev=repair.rev)
    rows = sorted([*repair.rows, *split_rows.others], key=lambda row: row.seq_nr)
    yield segment_batches(repair_segments(repair, rows), stamp=stamp)
    yield clear_batches(repair.extra_tags, repair.pointer.position, buckets, rev=repair.rev)
    for is_last in (False, True):
        in_pass = tuple(row for row in rows if (row.seq_nr in split_rows.row_numbers) is is_last)
        yield event_batches(PutEvents(repair.key, repair.head, in_pass), stamp=stamp, packed=False)
    written = {row.seq_nr for row in rows}
    yield _extra_events(repair, sorted({*repair.extra_rows, *split_rows.row_numbers} - written))
    tags = PutTags(repair.key, repair.head, repair.tags)
    yield tag_batches([tags], buckets, segments, stamp=stamp)
    yield head_batches([PutHead(repair.key, repair.head)], segments, tags={repair.key: tags}, stamp=stamp)


def _extra_events(repair: Repair, numbers: Sequence[int]) -> Iterator[Batch]:
    stamp = tombstone_stamp(repair.pointer.position, rev=repair.rev)
    for seq_nr in numbers:
        segment = event_segment(seq_nr, repair.head.segment_size)
        yield [CqlStatement(cql.CLEAR_EVENT, [stamp, repair.key.id, repair.key.topic, segment, seq_nr])]
