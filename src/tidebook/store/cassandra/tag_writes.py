"""Tag rows as batches of statements: by tag and bucket, under stamps from the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tidebook.core.buckets import Buckets
from tidebook.core.errors import Corrupt
from tidebook.core.event import event_tags
from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.replication import EventRow, PutTags, TagPlace, TagRow
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import BATCH_ROWS_MAX, Batch, Statement, bounded

_ROW_BYTES = 200


class Cell(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All of a tag row that its place does not say, in one cell."""

    id: str
    incarnation: Position
    tag_seq_nr: int
    event: EventRow


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Cell).decode


def tag_batches(
    writes: Iterable[PutTags], buckets: Buckets, *, stamp: int | None = None, rows_max: int = BATCH_ROWS_MAX
) -> Iterator[Batch]:
    """The rows of many journals by tag and bucket; which buckets a tag has; how far each journal's tags have come."""
    by_bucket: dict[tuple[str, int], list[tuple[int, Statement]]] = {}
    newest: dict[tuple[str, int], Position] = {}
    progress: dict[tuple[Key, str], TagRow] = {}
    for write in writes:
        for row in write.rows:
            position = row.position
            at = (row.tag, buckets.start(row.time_ms))
            cell = _encode(Cell(row.id, row.incarnation, row.tag_seq_nr, row.event))
            values = [*_place(row, at[1]), cell, stamp or write_stamp(position)]
            by_bucket.setdefault(at, []).append((len(cell) + _ROW_BYTES, Statement(cql.PUT_TAG, values)))
            newest[at] = max(newest.get(at, position), position)
            progress[write.key, row.tag] = row
    for sized in by_bucket.values():
        yield from bounded(sized, rows_max)
    for (tag, bucket), position in newest.items():
        yield [Statement(cql.PUT_TAG_BUCKET, [tag, bucket, stamp or write_stamp(position)])]
    for (key, tag), row in progress.items():
        values = [*key, tag, row.tag_seq_nr, row.seq_nr, row.epoch, row.offset, stamp or write_stamp(row.position)]
        yield [Statement(cql.PUT_TAG_PROGRESS, values)]


def places_of(key: Key, partition: int, row: EventRow) -> Iterator[TagPlace]:
    """Where an event's tag rows lie."""
    for tag in event_tags(row.kept):
        yield TagPlace(tag, row.time_ms, key.topic, partition, row.position.offset, row.index, row.position.epoch)


def clear_batches(
    places: Iterable[TagPlace], cleared_by: Position, buckets: Buckets, *, rev: int = 0
) -> Iterator[Batch]:
    """Tombstones of single tag rows, under the stamp of what clears them."""
    stamp = tombstone_stamp(cleared_by, rev=rev)
    by_bucket: dict[tuple[str, int], list[tuple[int, Statement]]] = {}
    for place in places:
        bucket = buckets.start(place.time_ms)
        statement = Statement(cql.CLEAR_TAG, [stamp, *_place(place, bucket)])
        by_bucket.setdefault((place.tag, bucket), []).append((_ROW_BYTES, statement))
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
