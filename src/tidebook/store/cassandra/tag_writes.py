"""Convert tag rows into batches of statements, by tag and bucket, under stamps from the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import msgspec

from tidebook.core.bounds import DECODE_ERRORS
from tidebook.core.buckets import Buckets
from tidebook.core.errors import Corrupt
from tidebook.core.event import event_tags
from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow, PutTags, TagPosition, TagRow
from tidebook.core.segments import head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import (
    BATCH_ROWS_MAX,
    PROGRESS_WITH_HEAD_MAX,
    Batch,
    CqlStatement,
    bounded,
    exceeds_head_batch,
    progress_of,
)

_ROW_BYTES = 200
_STREAM_ORDER = attrgetter("time_ms", "topic", "partition", "offset", "index")
_POSITION = attrgetter("epoch", "offset")


class TagCell(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a tag row that its primary key does not contain, encoded as one cell."""

    id: str
    incarnation: Position
    tag_seq_nr: int
    event: EventRow


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TagCell).decode


def tag_batches(
    writes: Iterable[PutTags],
    buckets: Buckets,
    segments: int,
    *,
    stamp: int | None = None,
    rows_max: int = BATCH_ROWS_MAX,
) -> Iterator[Batch]:
    """Yield the rows of many journals by tag and bucket, the buckets of the tags, and long progress rows.

    Short progress rows are written with their heads instead.
    """
    by_bucket: dict[tuple[str, int], list[TagRow]] = {}
    begin_ms = end_ms = 0
    for write in writes:
        for row in write.rows:
            if not begin_ms <= row.time_ms < end_ms:
                begin_ms, end_ms = buckets.span(row.time_ms)
            key = (row.tag, begin_ms)
            rows = by_bucket.get(key)
            if rows is None:
                rows = by_bucket[key] = []
            rows.append(row)
        if len(write.rows) > PROGRESS_WITH_HEAD_MAX:
            progress = progress_of(write, head_segment(write.key.id, segments), stamp)
            if exceeds_head_batch(progress):
                yield from bounded(((_ROW_BYTES, [each]) for each in progress), rows_max)
    for (tag, bucket), rows in by_bucket.items():
        # Sorted as in the bucket: adjacent rows cost a node two thirds as much as scattered ones.
        rows.sort(key=_STREAM_ORDER)
        yield from bounded(_puts(rows, bucket, stamp), rows_max)
        newest = stamp or write_stamp(max(rows, key=_POSITION).position)
        yield [CqlStatement(cql.PUT_TAG_BUCKET, [tag, bucket, newest])]


def _puts(rows: Iterable[TagRow], bucket: int, stamp: int | None) -> Iterator[tuple[int, Batch]]:
    """Yield one bucket's statements lazily: a slice may have a hundred thousand rows."""
    for row in rows:
        cell = _encode(_cell(row))
        values = [*_position_values(row, bucket), cell, stamp or write_stamp(row.position)]
        yield len(cell) + _ROW_BYTES, [CqlStatement(cql.PUT_TAG, values)]


def _cell(row: TagRow) -> tuple[Any, ...]:
    """Return the fields of a `TagCell` as plain tuples, which encode to the same bytes."""
    position, incarnation = (row.epoch, row.offset), (row.incarnation_epoch, row.incarnation_offset)
    event = (row.seq_nr, row.encoded, row.timestamp_ms, position, row.index, row.time_ms)
    return (row.id, incarnation, row.tag_seq_nr, event)


def tag_positions(key: Key, partition: int, row: EventRow) -> Iterator[TagPosition]:
    """Yield the positions of an event's tag rows."""
    for tag in event_tags(row.encoded):
        yield TagPosition(tag, row.time_ms, key.topic, partition, row.position.offset, row.index, row.position.epoch)


def clear_batches(
    positions: Iterable[TagPosition], cleared_by: Position, buckets: Buckets, *, rev: int = 0
) -> Iterator[Batch]:
    """Yield tombstones for single tag rows, under the stamp of the record that clears them."""
    stamp = tombstone_stamp(cleared_by, rev=rev)
    by_bucket: dict[tuple[str, int], list[tuple[int, Batch]]] = {}
    for position in positions:
        bucket = buckets.start(position.time_ms)
        statement = CqlStatement(cql.CLEAR_TAG, [stamp, *_position_values(position, bucket)])
        by_bucket.setdefault((position.tag, bucket), []).append((_ROW_BYTES, [statement]))
    for sized in by_bucket.values():
        yield from bounded(sized)


def _position_values(position: TagPosition | TagRow, bucket: int) -> list[Any]:
    return [
        position.tag, bucket, position.time_ms, position.topic, position.partition, position.offset, position.index,
        position.epoch,
    ]  # fmt: skip


def tag_row(tag: str, columns: tuple[Any, ...]) -> TagRow:
    """Decode a row; raise `Corrupt` if it is damaged."""
    time_ms, topic, partition, offset, index, epoch, cell = columns
    try:
        decoded = _decode(cell)
    except DECODE_ERRORS as error:
        raise Corrupt(f"a row of tag {tag!r} is damaged: {error}: rebuild the tag from the journal") from error
    incarnation, event = decoded.incarnation, decoded.event
    return TagRow(
        tag, time_ms, topic, partition, offset, index, epoch, decoded.id,
        incarnation.epoch, incarnation.offset, decoded.tag_seq_nr, event.seq_nr, event.timestamp_ms, event.encoded,
    )  # fmt: skip


def tag_row_or_damage(tag: str, columns: tuple[Any, ...]) -> TagRow | Damage:
    """Decode a row for a repair: a damaged one is returned as `Damage`, without the id of its journal."""
    try:
        return tag_row(tag, columns)
    except Corrupt as error:
        time_ms, topic, partition, offset, index, epoch, _ = columns
        position = TagPosition(tag, time_ms, topic, partition, offset, index, epoch)
        return Damage("tag", topic, None, str(error), place=position)
