"""Tag rows as batches of statements: by tag and bucket, under stamps from the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import msgspec

from tidebook.core.buckets import Buckets
from tidebook.core.errors import Corrupt
from tidebook.core.event import event_tags
from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.replication import EventRow, PutTags, TagPlace, TagRow
from tidebook.core.segments import head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import (
    BATCH_ROWS_MAX,
    PROGRESS_WITH_HEAD_MAX,
    Batch,
    Statement,
    bounded,
    is_long,
    progress_of,
)

_ROW_BYTES = 200
_STREAM_ORDER = attrgetter("time_ms", "topic", "partition", "offset", "index")
_POSITION = attrgetter("epoch", "offset")


class Cell(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All of a tag row that its place does not say, in one cell."""

    id: str
    incarnation: Position
    tag_seq_nr: int
    event: EventRow


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Cell).decode


def tag_batches(
    writes: Iterable[PutTags],
    buckets: Buckets,
    segments: int,
    *,
    stamp: int | None = None,
    rows_max: int = BATCH_ROWS_MAX,
) -> Iterator[Batch]:
    """The rows of many journals by tag and bucket; which buckets a tag has; how far journals of many tags have come.

    The progress of the others goes with their heads.
    """
    by_bucket: dict[tuple[str, int], list[TagRow]] = {}
    begin_ms = end_ms = 0
    for write in writes:
        for row in write.rows:
            if not begin_ms <= row.time_ms < end_ms:
                begin_ms, end_ms = buckets.span(row.time_ms)
            at = (row.tag, begin_ms)
            rows = by_bucket.get(at)
            if rows is None:
                rows = by_bucket[at] = []
            rows.append(row)
        if len(write.rows) > PROGRESS_WITH_HEAD_MAX:
            progress = progress_of(write, head_segment(write.key.id, segments), stamp)
            if is_long(progress):
                yield from bounded(((_ROW_BYTES, [each]) for each in progress), rows_max)
    for (tag, bucket), rows in by_bucket.items():
        # As they will lie in the bucket: rows that are neighbours there cost a node two thirds of scattered ones.
        rows.sort(key=_STREAM_ORDER)
        yield from bounded(_puts(rows, bucket, stamp), rows_max)
        newest = stamp or write_stamp(max(rows, key=_POSITION).position)
        yield [Statement(cql.PUT_TAG_BUCKET, [tag, bucket, newest])]


def _puts(rows: Iterable[TagRow], bucket: int, stamp: int | None) -> Iterator[tuple[int, Batch]]:
    """The statements of one bucket's rows, each made when it is sent: a slice may have a hundred thousand."""
    for row in rows:
        cell = _encode(_cell(row))
        values = [*_place(row, bucket), cell, stamp or write_stamp(row.position)]
        yield len(cell) + _ROW_BYTES, [Statement(cql.PUT_TAG, values)]


def _cell(row: TagRow) -> tuple[Any, ...]:
    """What a `Cell` has, as plain tuples, which are the same bytes."""
    at, life = (row.epoch, row.offset), (row.life_epoch, row.life_offset)
    event = (row.seq_nr, row.kept, row.timestamp_ms, at, row.index, row.time_ms)
    return (row.id, life, row.tag_seq_nr, event)


def places_of(key: Key, partition: int, row: EventRow) -> Iterator[TagPlace]:
    """Where an event's tag rows lie."""
    for tag in event_tags(row.kept):
        yield TagPlace(tag, row.time_ms, key.topic, partition, row.position.offset, row.index, row.position.epoch)


def clear_batches(
    places: Iterable[TagPlace], cleared_by: Position, buckets: Buckets, *, rev: int = 0
) -> Iterator[Batch]:
    """Tombstones of single tag rows, under the stamp of what clears them."""
    stamp = tombstone_stamp(cleared_by, rev=rev)
    by_bucket: dict[tuple[str, int], list[tuple[int, Batch]]] = {}
    for place in places:
        bucket = buckets.start(place.time_ms)
        statement = Statement(cql.CLEAR_TAG, [stamp, *_place(place, bucket)])
        by_bucket.setdefault((place.tag, bucket), []).append((_ROW_BYTES, [statement]))
    for sized in by_bucket.values():
        yield from bounded(sized)


def _place(place: TagPlace | TagRow, bucket: int) -> list[Any]:
    return [
        place.tag, bucket, place.time_ms, place.topic, place.partition, place.offset, place.index, place.epoch,
    ]  # fmt: skip


def tag_row(tag: str, columns: tuple[Any, ...]) -> TagRow:
    """A row as it was written."""
    time_ms, topic, partition, offset, index, epoch, cell = columns
    try:
        kept = _decode(cell)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"a row of tag {tag!r} is damaged: {error}: rebuild the tag from the journal") from error
    life, event = kept.incarnation, kept.event
    return TagRow(
        tag, time_ms, topic, partition, offset, index, epoch, kept.id,
        life.epoch, life.offset, kept.tag_seq_nr, event.seq_nr, event.timestamp_ms, event.kept,
    )  # fmt: skip
