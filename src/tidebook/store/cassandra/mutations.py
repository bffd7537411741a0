"""A slice's writes as batches of statements: which rows, under which stamps, in which rounds. Nothing here does I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, assert_never

import msgspec

from tidebook.core.head import Head, encode_head
from tidebook.core.key import Key
from tidebook.core.position import tombstone_stamp, write_stamp
from tidebook.core.replication import (
    ClearEvents,
    ClearJournal,
    EventRow,
    Parked,
    PutEvents,
    PutHead,
    PutTags,
    SliceWrites,
    TagRow,
    Write,
    segments_between,
)
from tidebook.core.segments import event_segment, head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.rows import EVENTS_A_ROW_MAX, encode_row, encode_rows

BATCH_BYTES_MAX: Final = 40_000
BATCH_ROWS_MAX: Final = 100
PROGRESS_WITH_HEAD_MAX: Final = 20
#: A longer record is kept in part: Cassandra refuses a mutation over half a commit log segment, 16 MiB by default.
PARKED_BYTES_MAX: Final = 4_000_000
#: Stands behind the reason of a record that was cut.
_CUT_NOTE: Final = " (kept: the first {:,} of {:,} bytes)"
_CUT_SIZE: Final = re.compile(r" \(kept: the first [\d,]+ of ([\d,]+) bytes\)$")
#: What a row's key and bookkeeping are taken for.
_ROW_BYTES: Final = 100
#: Beside the head itself: the columns that repeat parts of it.
_HEAD_ROW_BYTES: Final = 150
NEVER_EXPIRES: Final = 0


class Statement(msgspec.Struct, frozen=True, gc=False):
    """A statement and its values. Each row that is written has one."""

    cql: str
    values: list[Any]


#: Statements that are carried out together: of one partition of one table, until they are gathered.
Batch = list[Statement]


def rounds_of(
    writes: SliceWrites, segments: int, cut: Mapping[Key, Sequence[EventRow]] | None = None
) -> Iterator[Iterator[Batch]]:
    """All batches of a slice. Those of a round may run in any order; each round is acknowledged before the next.

    A key's writes are spread over rounds, so that its own order holds and the heads of many keys share batches.
    The pointer is the last round, alone. `cut` has what a delete leaves of a row that events before it share.
    """
    if writes.parked:
        yield ([_parked(each)] for each in writes.parked)
    for i in range(max(map(len, writes.keys), default=0)):
        before = (key[i - 1] for key in writes.keys if 0 < i < len(key))
        tags = {write.key: write for write in before if isinstance(write, PutTags)}
        yield _batches([key[i] for key in writes.keys if i < len(key)], tags, segments, cut or {})
    yield iter([[_pointer(writes)]])


def _batches(
    writes: Sequence[Write], tags: Mapping[Key, PutTags], segments: int, cut: Mapping[Key, Sequence[EventRow]]
) -> Iterator[Batch]:
    heads: list[PutHead] = []
    for write in writes:
        match write:
            case PutHead():
                heads.append(write)
            case PutEvents():
                yield from event_batches(write)
            case PutTags():
                pass  # by tag and bucket, over all journals: `tag_batches`
            case ClearEvents():
                yield from clear_events(write)
                yield from _rows_left(write, cut.get(write.key, ()))
            case ClearJournal():
                yield from clear_journal(write)
            case _:
                assert_never(write)
    yield from head_batches(heads, segments, tags=tags)


def event_batches(write: PutEvents, *, stamp: int | None = None, apart: bool = False) -> Iterator[Batch]:
    """The rows of one journal, by segment, in batches that are bounded by bytes and rows.

    Events of one record share rows, unless they are to lie `apart`.
    """
    # One pass without a call that could be spared: each event of the log comes through here.
    topic, id = write.key
    rows, segment_size = write.rows, write.head.segment_size
    row_bytes = len(id) + _ROW_BYTES
    batch: Batch = []
    room = segment = segment_first = segment_last = i = 0
    count = len(rows)
    while i < count:
        row = rows[i]
        i += 1
        seq_nr, position = row.seq_nr, row.position
        in_segment = segment_first <= seq_nr <= segment_last
        if not in_segment:
            segment = event_segment(seq_nr, segment_size)
            segment_first, segment_last = segment * segment_size + 1, (segment + 1) * segment_size
        if apart or i == count or rows[i].position is not position:
            cell = encode_row(row)
        else:
            stop = _shared_to(rows, i - 1, segment_last)
            cell, seq_nr, i = encode_rows(rows[i - 1 : stop]), rows[stop - 1].seq_nr, stop
        room -= len(cell) + row_bytes
        if room < 0 or len(batch) == BATCH_ROWS_MAX or not in_segment:
            if batch:
                yield batch
            batch, room = [], BATCH_BYTES_MAX - len(cell) - row_bytes
        batch.append(Statement(cql.PUT_EVENT, [id, topic, segment, seq_nr, cell, stamp or write_stamp(position)]))
    if batch:
        yield batch


def _shared_to(rows: Sequence[EventRow], start: int, segment_last: int) -> int:
    """Behind which row those end that share one with the row at `start`: of its record, one number after the other."""
    first = rows[start]
    position, number = first.position, first.seq_nr - first.index
    index_end = first.index // EVENTS_A_ROW_MAX * EVENTS_A_ROW_MAX + EVENTS_A_ROW_MAX
    stop = start + 1
    while stop < len(rows):
        row = rows[stop]
        index = first.index + stop - start
        if row.position is not position or row.index != index or index >= index_end:
            break
        if row.seq_nr != number + index or row.seq_nr > segment_last:
            break
        stop += 1
    return stop


def head_batches(
    writes: Iterable[PutHead], segments: int, *, tags: Mapping[Key, PutTags], stamp: int | None = None
) -> Iterator[Batch]:
    """Heads of many journals, by the segment of `metajournal` they live in, each with the progress of its tags.

    Both tables have the same partitions, so a node takes a head and its progress as one mutation: all of it or nothing.
    """
    by_segment: dict[tuple[str, int], list[tuple[int, Batch]]] = {}
    for write in writes:
        topic, id = write.key
        segment = head_segment(id, segments)
        data = encode_head(write.head)
        size = len(data) + len(id) + _HEAD_ROW_BYTES
        together: Batch = []
        put = tags.get(write.key)
        if put is not None and not is_long(progress := progress_of(put, segment, stamp)):
            together = progress
            size += len(progress) * (len(id) + _HEAD_ROW_BYTES)
        together.append(Statement(cql.PUT_HEAD, _head_values(write.key, segment, write.head, data, stamp)))
        by_segment.setdefault((topic, segment), []).append((size, together))
    for sized in by_segment.values():
        yield from bounded(sized)


def progress_of(tags: PutTags, segment: int, stamp: int | None) -> Batch:
    """How far each of a journal's tags has come."""
    topic, id = tags.key
    latest = {row.tag: row for row in tags.rows}
    return [
        Statement(cql.PUT_TAG_PROGRESS, [topic, segment, id, tag, *_progress_values(row, stamp)])
        for tag, row in latest.items()
    ]


def _progress_values(row: TagRow, stamp: int | None) -> list[Any]:
    return [row.tag_seq_nr, row.seq_nr, row.epoch, row.offset, stamp or write_stamp(row.position)]


def is_long(progress: Batch) -> bool:
    """Whether it is more than can go in one batch with a head: it goes before, with the tag rows."""
    return len(progress) > PROGRESS_WITH_HEAD_MAX


def _head_values(key: Key, segment: int, head: Head, data: bytes, stamp: int | None) -> list[Any]:
    expires_at_ms = head.expires_at_ms
    return [
        key.topic, segment, key.id, data, head.live, head.seq_nr, head.delete_to, head.position.epoch,
        head.position.offset, NEVER_EXPIRES if expires_at_ms is None else expires_at_ms,
        stamp or write_stamp(head.position),
    ]  # fmt: skip


def clear_events(write: ClearEvents) -> Iterator[Batch]:
    """Tombstones for the numbers up to the head's delete_to, whole segments where all of one is meant."""
    topic, id = write.key
    head = write.head
    stamp = tombstone_stamp(head.position)
    for segments in segments_between(head, write.above, head.delete_to):
        for segment in segments:
            if (segment + 1) * head.segment_size <= head.delete_to:
                yield [Statement(cql.CLEAR_SEGMENT, [stamp, id, topic, segment])]
            else:
                yield [Statement(cql.CLEAR_EVENTS, [stamp, id, topic, segment, head.delete_to])]


def _rows_left(write: ClearEvents, rows: Sequence[EventRow]) -> Iterator[Batch]:
    """Over the row that they shared with what is deleted, and above its stamp, whoever writes that one again."""
    yield from event_batches(PutEvents(write.key, write.head, tuple(rows)), stamp=write_stamp(write.head.position))


def clear_journal(write: ClearJournal) -> Iterator[Batch]:
    """Tombstones for all that a life left: every segment up to its last number, and its snapshots."""
    topic, id = write.key
    head = write.head
    stamp = tombstone_stamp(head.position)
    for segments in segments_between(head, 0, head.seq_nr):
        for segment in segments:
            yield [Statement(cql.CLEAR_SEGMENT, [stamp, id, topic, segment])]
    yield [Statement(cql.CLEAR_SNAPSHOTS, [stamp, topic, id, head.incarnation.epoch, head.incarnation.offset])]


def _pointer(writes: SliceWrites) -> Statement:
    position, time_ms = writes.pointer.position, writes.pointer.time_ms
    values = [writes.topic, writes.partition, position.epoch, position.offset, time_ms, write_stamp(position)]
    return Statement(cql.PUT_POINTER, values)


def _parked(parked: Parked) -> Statement:
    reason, value = parked.reason, parked.value
    if len(value) > PARKED_BYTES_MAX:
        reason = f"{reason}{_CUT_NOTE.format(PARKED_BYTES_MAX, len(value))}"
        value = value[:PARKED_BYTES_MAX]
    epoch, offset = parked.position
    values = [
        parked.topic, parked.partition, epoch, offset, parked.timestamp_ms, parked.id or "", reason, value,
        write_stamp(parked.position),
    ]  # fmt: skip
    return Statement(cql.PUT_PARKED, values)


def whole_bytes(reason: str) -> int | None:
    """The size of a parked record that was cut, as the reason beside it tells."""
    found = _CUT_SIZE.search(reason)
    return None if found is None else int(found[1].replace(",", ""))


def unpark(parked: Parked) -> Statement:
    """Under the stamp of the row itself, where a tombstone wins: a replay does not bring the record back."""
    epoch, offset = parked.position
    return Statement(cql.UNPARK, [write_stamp(parked.position), parked.topic, parked.partition, epoch, offset])


def bounded(sized: Iterable[tuple[int, Batch]], rows_max: int = BATCH_ROWS_MAX) -> Iterator[Batch]:
    """Statements of one partition in batches that are bounded by bytes and rows; what is larger by itself goes alone.

    What comes as one stays together.
    """
    batch: Batch = []
    batch_bytes = 0
    for size, together in sized:
        if batch and (len(batch) + len(together) > rows_max or batch_bytes + size > BATCH_BYTES_MAX):
            yield batch
            batch, batch_bytes = [], 0
        batch += together
        batch_bytes += size
    if batch:
        yield batch
