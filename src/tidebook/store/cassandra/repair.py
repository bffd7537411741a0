"""Convert the repair of a journal into batches of statements.

All of them carry the stamp of the pointer instead of the records': a repair wins over everything that the pointer has
passed, and over earlier repairs by its revision. Everything replicated later wins over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidebook.core.buckets import Buckets
from tidebook.core.position import tombstone_stamp, write_stamp
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import PutEvents, PutHead, PutTags
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
from tidebook.store.cassandra.packed_rows import SplitRows
from tidebook.store.cassandra.tag_writes import clear_batches, tag_batches


def repair_rounds(repair: Repair, segments: int, buckets: Buckets, split_rows: SplitRows) -> Iterator[Iterator[Batch]]:
    """Yield all batches of a repair, in rounds. Each round is acknowledged before the next.

    Repaired events get rows of their own, and so do the events that shared a packed row with them. A packed row is
    replaced last, when all of its events are elsewhere: its number is that of its last event.
    """
    stamp = write_stamp(repair.pointer.position, rev=repair.rev)
    rows = sorted([*repair.rows, *split_rows.others], key=lambda row: row.seq_nr)
    yield segment_batches(repair_segments(repair, rows), stamp=stamp)
    yield clear_batches(repair.extra_tags, repair.pointer.position, buckets, rev=repair.rev)
    for is_last in (False, True):
        some = tuple(row for row in rows if (row.seq_nr in split_rows.row_numbers) is is_last)
        yield event_batches(PutEvents(repair.key, repair.head, some), stamp=stamp, packed=False)
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
