"""Convert a slice's writes into batches of statements with their write timestamps (stamps), in rounds. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, assert_never

import msgspec

from tidebook.core.head import Head, encode_head
from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.repair import REV_MAX, Repair
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    EventRow,
    ForgetSegments,
    Parked,
    PutEvents,
    PutHead,
    PutSegments,
    PutTags,
    SliceWrites,
    TagRow,
    Write,
    segments_between,
)
from tidebook.core.segments import event_segment, head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.rows import EVENTS_PER_ROW_MAX, encode_row, encode_rows

BATCH_BYTES_MAX: Final = 40_000
BATCH_ROWS_MAX: Final = 100
PROGRESS_WITH_HEAD_MAX: Final = 20
#: A longer record is truncated, because Cassandra rejects a mutation over half a commit log segment (16 MiB by
#: default).
PARKED_BYTES_MAX: Final = 4_000_000
#: Appended to the reason of a truncated record, for people; the `size_bytes` column has the size.
_TRUNCATED_NOTE: Final = " (kept: the first {:,} of {:,} bytes)"
#: The assumed size of a row's key and metadata.
_ROW_BYTES: Final = 100
#: The assumed size of the columns that repeat parts of the head.
_HEAD_ROW_BYTES: Final = 150
NEVER_EXPIRES: Final = 0


class CqlStatement(msgspec.Struct, frozen=True, gc=False):
    """A CQL text and its values. Each row is written by its own statement."""

    cql: str
    values: list[Any]


#: Statements that are executed together. They belong to one partition of one table, until `coalesce_batches` combines
#: them.
Batch = list[CqlStatement]
#: The listed segments of the incarnations that a slice clears.
ListedSegments = Mapping[tuple[Key, Position], Sequence[int]]


def batch_rounds(
    writes: SliceWrites,
    segments: int,
    remaining: Mapping[Key, Sequence[EventRow]] | None = None,
    listed: ListedSegments | None = None,
) -> Iterator[Iterator[Batch]]:
    """Yield all batches of a slice in rounds; a round may be written in any order, but before the next one.

    The writes of a key are spread over the rounds, which keeps their order and lets the heads of many keys share
    batches. The last round writes only the pointer. `remaining` has the events of packed rows that a delete does not
    cover, and `listed` the listed segments of the incarnations that are cleared.
    """
    if writes.parked:
        yield ([_parked(each)] for each in writes.parked)
    for i in range(max(map(len, writes.keys), default=0)):
        before = (key[i - 1] for key in writes.keys if 0 < i < len(key))
        tags = {write.key: write for write in before if isinstance(write, PutTags)}
        yield _batches([key[i] for key in writes.keys if i < len(key)], tags, segments, remaining or {}, listed or {})
    yield iter([[_pointer(writes)]])


def _batches(
    writes: Sequence[Write],
    tags: Mapping[Key, PutTags],
    segments: int,
    remaining: Mapping[Key, Sequence[EventRow]],
    listed: ListedSegments,
) -> Iterator[Batch]:
    heads: list[PutHead] = []
    for write in writes:
        match write:
            case PutHead():
                heads.append(write)
            case PutEvents():
                yield from event_batches(write)
            case PutTags():
                pass  # written by tag and bucket over all journals: `tag_batches`
            case PutSegments():
                pass  # written before all rounds: `segment_batches`
            case ClearEvents():
                yield from clear_events(write, listed.get((write.key, write.head.incarnation), ()))
                yield from _rewrite_remaining(write, remaining.get(write.key, ()))
            case ClearJournal():
                yield from clear_journal(write, listed.get((write.key, write.head.incarnation), ()))
            case ForgetSegments():
                yield [_forget_segments(write)]
            case _:
                assert_never(write)
    yield from head_batches(heads, segments, tags=tags)


def event_batches(write: PutEvents, *, stamp: int | None = None, packed: bool = True) -> Iterator[Batch]:
    """Yield the rows of one journal by segment, in batches bounded by bytes and rows.

    Events of one record share packed rows, unless `packed` is false.
    """
    # One pass with as few calls as possible, because it runs for every event of the log.
    topic, id = write.key
    rows, segment_size = write.rows, write.head.segment_size
    row_bytes = len(id) + _ROW_BYTES
    batch: Batch = []
    room = segment = segment_last = i = 0
    count = len(rows)
    while i < count:
        row = rows[i]
        i += 1
        seq_nr, position = row.seq_nr, row.position
        in_segment = seq_nr <= segment_last  # the numbers of a journal's rows ascend
        if not in_segment:
            segment = event_segment(seq_nr, segment_size)
            segment_last = (segment + 1) * segment_size
        if not packed or i == count or rows[i].position is not position:
            cell = encode_row(row)
        else:
            stop = _packed_end(rows, i - 1, segment_last)
            cell, seq_nr, i = encode_rows(rows[i - 1 : stop]), rows[stop - 1].seq_nr, stop
        room -= len(cell) + row_bytes
        if room < 0 or len(batch) == BATCH_ROWS_MAX or not in_segment:
            if batch:
                yield batch
            batch, room = [], BATCH_BYTES_MAX - len(cell) - row_bytes
        batch.append(CqlStatement(cql.PUT_EVENT, [id, topic, segment, seq_nr, cell, stamp or write_stamp(position)]))
    if batch:
        yield batch


def _packed_end(rows: Sequence[EventRow], start: int, segment_last: int) -> int:
    """Return the end of the packed row that starts at `start`: consecutive numbers of one record and segment."""
    first = rows[start]
    position, first_number = first.position, first.seq_nr - first.index
    index_end = first.index // EVENTS_PER_ROW_MAX * EVENTS_PER_ROW_MAX + EVENTS_PER_ROW_MAX
    stop = start + 1
    while stop < len(rows):
        row = rows[stop]
        index = first.index + stop - start
        if row.position is not position or row.index != index or index >= index_end:
            break
        if row.seq_nr != first_number + index or row.seq_nr > segment_last:
            break
        stop += 1
    return stop


def head_batches(
    writes: Iterable[PutHead], segments: int, *, tags: Mapping[Key, PutTags], stamp: int | None = None
) -> Iterator[Batch]:
    """Yield heads by segment of `metajournal`, each with the progress of its journal's tags.

    Both tables have the same partitions, so a node applies a head and its progress as one mutation, atomically.
    """
    by_segment: dict[tuple[str, int], list[tuple[int, Batch]]] = {}
    for write in writes:
        topic, id = write.key
        segment = head_segment(id, segments)
        data = encode_head(write.head)
        size = len(data) + len(id) + _HEAD_ROW_BYTES
        group: Batch = []
        put = tags.get(write.key)
        if put is not None and not exceeds_head_batch(progress := progress_of(put, segment, stamp)):
            group = progress
            size += len(progress) * (len(id) + _HEAD_ROW_BYTES)
        group.append(CqlStatement(cql.PUT_HEAD, _head_values(write.key, segment, write.head, data, stamp)))
        by_segment.setdefault((topic, segment), []).append((size, group))
    for sized in by_segment.values():
        yield from bounded(sized)


def clear_graves(topic: str, graves: Iterable[tuple[str, Head]], segments: int) -> Iterator[Batch]:
    """Yield tombstones for graves, stamped above every write of the grave and below the partition's next record."""
    for id, grave in graves:
        stamp = write_stamp(grave.position, rev=REV_MAX)
        yield [CqlStatement(cql.CLEAR_HEAD, [stamp, topic, head_segment(id, segments), id])]


def progress_of(tags: PutTags, segment: int, stamp: int | None) -> Batch:
    """Return the statements that store the progress of each of a journal's tags."""
    topic, id = tags.key
    latest = {row.tag: row for row in tags.rows}
    return [
        CqlStatement(cql.PUT_TAG_PROGRESS, [topic, segment, id, tag, *_progress_values(row, stamp)])
        for tag, row in latest.items()
    ]


def _progress_values(row: TagRow, stamp: int | None) -> list[Any]:
    return [row.tag_seq_nr, row.seq_nr, row.epoch, row.offset, stamp or write_stamp(row.position)]


def exceeds_head_batch(progress: Batch) -> bool:
    """Return whether tag progress is too long for its head's batch; it is then written with the tag rows, earlier."""
    return len(progress) > PROGRESS_WITH_HEAD_MAX


def _head_values(key: Key, segment: int, head: Head, data: bytes, stamp: int | None) -> list[Any]:
    expires_at_ms = head.expires_at_ms
    return [
        key.topic, segment, key.id, data, head.live, head.seq_nr, head.delete_to, head.position.epoch,
        head.position.offset, NEVER_EXPIRES if expires_at_ms is None else expires_at_ms,
        stamp or write_stamp(head.position),
    ]  # fmt: skip


def segment_batches(write: PutSegments, *, stamp: int | None = None) -> Iterator[Batch]:
    """Yield the rows of an incarnation's segment list.

    They have the stamp of the incarnation's first record, so that any clear overrules them: a segment is only unlisted
    when all of its numbers are deleted, so it is never needed again.
    """
    topic, id = write.key
    incarnation = write.head.incarnation
    stamp = stamp or write_stamp(incarnation)
    rows = (
        (
            len(id) + _ROW_BYTES,
            [CqlStatement(cql.PUT_SEGMENT, [id, topic, incarnation.epoch, incarnation.offset, segment, stamp])],
        )
        for segments in write.segments
        for segment in segments
    )
    yield from bounded(rows)


def repair_segments(repair: Repair, rows: Iterable[EventRow]) -> PutSegments:
    """Return the segments that must be listed for the rows of a repaired journal to be found."""
    head = repair.head
    segments = {*repair.segments, *(event_segment(row.seq_nr, head.segment_size) for row in rows)}
    listed = tuple(range(each, each + 1) for each in sorted(segments) if each < head.run_start)
    return PutSegments(repair.key, head, listed)


def _forget_segments(write: ForgetSegments) -> CqlStatement:
    topic, id = write.key
    head = write.head
    values = [tombstone_stamp(head.position), id, topic, head.incarnation.epoch, head.incarnation.offset]
    if not head.live:
        return CqlStatement(cql.CLEAR_ALL_SEGMENTS, values)
    return CqlStatement(cql.CLEAR_SEGMENTS, [*values, head.delete_to // head.segment_size])


def clear_events(write: ClearEvents, listed: Iterable[int] = ()) -> Iterator[Batch]:
    """Yield tombstones for the numbers up to the head's `delete_to`, for whole segments where possible."""
    topic, id = write.key
    head = write.head
    stamp = tombstone_stamp(head.position)
    for segment in chain(listed, *segments_between(head, write.above, head.delete_to)):
        if (segment + 1) * head.segment_size <= head.delete_to:
            yield [CqlStatement(cql.CLEAR_SEGMENT, [stamp, id, topic, segment])]
        else:
            yield [CqlStatement(cql.CLEAR_EVENTS, [stamp, id, topic, segment, head.delete_to])]


def _rewrite_remaining(write: ClearEvents, rows: Sequence[EventRow]) -> Iterator[Batch]:
    """Rewrite the events that shared a packed row with deleted ones, above the stamp of that row.

    They overrule that row even if a slow replicator writes all of it again.
    """
    yield from event_batches(PutEvents(write.key, write.head, tuple(rows)), stamp=write_stamp(write.head.position))


def clear_journal(write: ClearJournal, listed: Iterable[int] = ()) -> Iterator[Batch]:
    """Yield tombstones for everything an incarnation wrote: all segments up to its last number, and its snapshots."""
    topic, id = write.key
    head = write.head
    stamp = tombstone_stamp(head.position)
    for segment in chain(listed, *segments_between(head, 0, head.seq_nr)):
        yield [CqlStatement(cql.CLEAR_SEGMENT, [stamp, id, topic, segment])]
    yield [CqlStatement(cql.CLEAR_SNAPSHOTS, [stamp, topic, id, head.incarnation.epoch, head.incarnation.offset])]


def _pointer(writes: SliceWrites) -> CqlStatement:
    position, time_ms = writes.pointer.position, writes.pointer.time_ms
    values = [writes.topic, writes.partition, position.epoch, position.offset, time_ms, write_stamp(position)]
    return CqlStatement(cql.PUT_POINTER, values)


def _parked(parked: Parked) -> CqlStatement:
    reason, value, size_bytes = parked.reason, parked.value, len(parked.value)
    if size_bytes > PARKED_BYTES_MAX:
        reason = f"{reason}{_TRUNCATED_NOTE.format(PARKED_BYTES_MAX, size_bytes)}"
        value = value[:PARKED_BYTES_MAX]
    epoch, offset = parked.position
    values = [
        parked.topic, parked.partition, epoch, offset, parked.timestamp_ms, parked.id or "", reason, value, size_bytes,
        write_stamp(parked.position),
    ]  # fmt: skip
    return CqlStatement(cql.PUT_PARKED, values)


def parked_row(columns: tuple[Any, ...]) -> Parked:
    """Decode a row of `parked`; `whole_bytes` is set if the value was truncated."""
    topic, partition, epoch, offset, timestamp_ms, id, reason, value, size_bytes = columns
    whole_bytes = size_bytes if size_bytes > len(value) else None
    return Parked(topic, partition, Position(epoch, offset), timestamp_ms, id or None, reason, value, whole_bytes)


def unpark(parked: Parked) -> CqlStatement:
    """Return a tombstone with the stamp of the record itself: it wins even if the record is replicated again."""
    epoch, offset = parked.position
    return CqlStatement(cql.UNPARK, [write_stamp(parked.position), parked.topic, parked.partition, epoch, offset])


def bounded(sized: Iterable[tuple[int, Batch]], rows_max: int = BATCH_ROWS_MAX) -> Iterator[Batch]:
    """Yield groups of statements of one partition in batches bounded by bytes and rows.

    A group is never split over batches; one over the bounds gets its own.
    """
    batch: Batch = []
    batch_bytes = 0
    for size, group in sized:
        if batch and (len(batch) + len(group) > rows_max or batch_bytes + size > BATCH_BYTES_MAX):
            yield batch
            batch, batch_bytes = [], 0
        batch += group
        batch_bytes += size
    if batch:
        yield batch


#: By default a node warns about a multi-partition batch over 5 KiB and rejects one over 50 KiB.
COALESCED_BYTES_MAX: Final = 5_000
#: A batch with more rows is not combined with others.
COALESCED_BATCH_ROWS_MAX: Final = 10
HEADS_PER_QUERY_MAX: Final = 100
#: The maximum number of ids of a query over several segments, because each segment is searched for all of them.
SEGMENTS_QUERY_IDS_MAX: Final = 15
#: The assumed size of a value without a length.
_VALUE_BYTES: Final = 8
#: A cell's overhead as a node counts it; a head has seven cells.
_CELL_BYTES: Final = 16


def coalesce_batches(batches: Iterable[Batch], partitions_max: int, *, rows_max: int | None = None) -> Iterator[Batch]:
    """Yield the batches of one round, with small ones combined over up to `partitions_max` partitions.

    Each input batch belongs to one partition of one table. `rows_max`, if given, limits the rows of a combined batch.
    """
    group: Batch = []
    partitions = group_bytes = 0
    for batch in batches:
        if len(batch) > COALESCED_BATCH_ROWS_MAX or partitions_max == 1:
            yield batch
            continue
        size = sum(_size_bytes(statement.values) for statement in batch)
        full = partitions == partitions_max or (rows_max is not None and len(group) + len(batch) > rows_max)
        if group and (full or group_bytes + size > COALESCED_BYTES_MAX):
            yield group
            group, partitions, group_bytes = [], 0, 0
        group = group + batch
        partitions += 1
        group_bytes += size
    if group:
        yield group


def _size_bytes(values: list[object]) -> int:
    value_bytes = sum(len(value) if isinstance(value, (bytes, str)) else _VALUE_BYTES for value in values)
    return value_bytes + _CELL_BYTES * len(values)


def head_queries(topic: str, ids: Sequence[str], segments: int, *, partitions_max: int) -> Iterator[CqlStatement]:
    """Yield the queries for many heads: one per segment, or one over several segments that have few ids each."""
    by_segment: dict[int, list[str]] = {}
    for id in ids:
        by_segment.setdefault(head_segment(id, segments), []).append(id)
    few_ids: dict[int, list[str]] = {}
    count = 0
    for segment, wanted in by_segment.items():
        if partitions_max == 1 or len(wanted) > SEGMENTS_QUERY_IDS_MAX // 2:
            for i in range(0, len(wanted), HEADS_PER_QUERY_MAX):
                yield CqlStatement(cql.HEADS, [topic, segment, wanted[i : i + HEADS_PER_QUERY_MAX]])
            continue
        if len(few_ids) == partitions_max or count + len(wanted) > SEGMENTS_QUERY_IDS_MAX:
            yield _query_few(topic, few_ids)
            few_ids, count = {}, 0
        few_ids[segment] = wanted
        count += len(wanted)
    if few_ids:
        yield _query_few(topic, few_ids)


def _query_few(topic: str, few_ids: dict[int, list[str]]) -> CqlStatement:
    if len(few_ids) == 1:
        [(segment, ids)] = few_ids.items()
        return CqlStatement(cql.HEADS, [topic, segment, ids])
    return CqlStatement(cql.HEADS_OF_SEGMENTS, [topic, list(few_ids), [id for ids in few_ids.values() for id in ids]])
