"""A mend as batches of statements.

All of it carries the stamp of the pointer, not of the records: it wins over whatever lies there that the pointer has
passed, and over earlier mends by its revision; everything that is yet to come wins over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidebook.core.buckets import Buckets
from tidebook.core.mend import Mend
from tidebook.core.position import tombstone_stamp, write_stamp
from tidebook.core.replication import PutEvents, PutHead, PutTags
from tidebook.core.segments import event_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import Batch, Statement, event_batches, head_batches
from tidebook.store.cassandra.shared import Apart
from tidebook.store.cassandra.tag_writes import clear_batches, tag_batches


def mend_rounds(mend: Mend, segments: int, buckets: Buckets, apart: Apart) -> Iterator[Iterator[Batch]]:
    """All batches of a mend. Each round is acknowledged before the next.

    Events that are mended get rows of their own, and so do those they shared one with. A shared row goes last, when
    all that it held lies elsewhere: it has the number of its last event.
    """
    stamp = write_stamp(mend.pointer.position, rev=mend.rev)
    rows = sorted([*mend.rows, *apart.beside], key=lambda row: row.seq_nr)
    yield clear_batches(mend.extra_tags, mend.pointer.position, buckets, rev=mend.rev)
    for own in (False, True):
        some = tuple(row for row in rows if (row.seq_nr in apart.lasts) is own)
        yield event_batches(PutEvents(mend.key, mend.head, some), stamp=stamp, apart=True)
    written = {row.seq_nr for row in rows}
    yield _extra_events(mend, sorted({*mend.extra_rows, *apart.lasts} - written))
    tags = PutTags(mend.key, mend.head, mend.tags)
    yield tag_batches([tags], buckets, segments, stamp=stamp)
    yield head_batches([PutHead(mend.key, mend.head)], segments, tags={mend.key: tags}, stamp=stamp)


def _extra_events(mend: Mend, numbers: Sequence[int]) -> Iterator[Batch]:
    stamp = tombstone_stamp(mend.pointer.position, rev=mend.rev)
    for seq_nr in numbers:
        segment = event_segment(seq_nr, mend.head.segment_size)
        yield [Statement(cql.CLEAR_EVENT, [stamp, mend.key.id, mend.key.topic, segment, seq_nr])]
