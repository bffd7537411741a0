"""Reading pages of records, each within one moment of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import apsw

from tidebook.core.errors import Corrupt, LogLost, NotFound
from tidebook.log.embedded.chunks import Packed, base, unpack
from tidebook.log.embedded.key_index import KeyIndex
from tidebook.log.embedded.key_runs import chunk_of
from tidebook.log.port import Batch, Record

_BOUNDS = """SELECT p.id, p.start_offset, p.next_offset, p.indexed_to
    FROM topic t JOIN partition p ON p.topic_id = t.topic_id WHERE t.name = ? AND p.number = ?"""
_CHUNKS = "SELECT id, time_ms, body FROM chunk WHERE id >= ? AND id < ? ORDER BY id"
_CHUNK = "SELECT id, time_ms, body FROM chunk WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"


class Bounds(NamedTuple):
    """A partition as it is at one moment."""

    id: int
    start: int
    end: int
    indexed_to: int


class Page(NamedTuple):
    """What a reader asks for."""

    topic: str
    partition: int
    start: int
    stop: int
    limit: int
    limit_bytes: int


def bounds(connection: apsw.Connection, topic: str, partition: int) -> Bounds:
    """The bounds of a partition now."""
    row = connection.execute(_BOUNDS, (topic, partition)).fetchone()
    if row is None:
        raise NotFound(f"the log has no partition {partition} of topic {topic!r}")
    return Bounds._make(row)


def read(connection: apsw.Connection, page: Page, key: bytes | None, index: KeyIndex) -> Batch:
    """A page of records; bounds and records are of one moment, so no truncate can fall between them."""
    connection.execute("BEGIN")
    try:
        at = bounds(connection, page.topic, page.partition)
        if page.start < at.start:
            raise LogLost(topic=page.topic, partition=page.partition, first=page.start, last=at.start - 1)
        stop = min(page.stop, at.end)
        if page.start >= stop:
            return Batch((), page.start)
        if key is None:
            records = _scan(connection, at.id, page.start, stop)
        else:
            offsets = index.offsets(connection, at.id, key, page.start, stop, at.indexed_to)
            records = _pick(connection, at.id, key, offsets)
        return _fill(records, stop, page.limit, page.limit_bytes)
    finally:
        connection.execute("COMMIT")


def _fill(records: Iterator[Record], stop: int, limit: int, limit_bytes: int) -> Batch:
    taken: list[Record] = []
    size_bytes = 0
    for record in records:
        size_bytes += len(record.value or b"")
        if taken and size_bytes > limit_bytes:
            return Batch(tuple(taken), taken[-1].offset + 1)
        taken.append(record)
        if len(taken) >= limit:
            return Batch(tuple(taken), record.offset + 1)
    return Batch(tuple(taken), stop)


def _scan(connection: apsw.Connection, partition_id: int, start: int, stop: int) -> Iterator[Record]:
    low = base(partition_id)
    for id, time_ms, body in connection.execute(_CHUNKS, (chunk_of(connection, partition_id, start), low + stop)):
        for offset, packed in enumerate(unpack(body), id - low):
            if start <= offset < stop:
                yield Record(offset, time_ms, packed.key, packed.value, packed.headers)


def _pick(connection: apsw.Connection, partition_id: int, key: bytes, offsets: Iterator[int]) -> Iterator[Record]:
    low = base(partition_id)
    first = time_ms = 0
    chunk: list[Packed] = []
    for offset in offsets:
        if not 0 <= offset - first < len(chunk):
            row = connection.execute(_CHUNK, (low, low + offset)).fetchone()
            if row is None:
                raise Corrupt(f"the log lacks offset {offset}: restore a copy of log.db")
            first, time_ms, chunk = row[0] - low, row[1], unpack(row[2])
        packed = chunk[offset - first]
        if packed.key == key:
            yield Record(offset, time_ms, key, packed.value, packed.headers)
