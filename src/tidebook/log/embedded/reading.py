"""Reading pages of records, each within one moment of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import apsw

from tidebook.core.errors import Corrupt, LogLost, NotFound
from tidebook.log.embedded.chunks import Bounds, Moved, Packed, base, unpack
from tidebook.log.embedded.key_index import KeyIndex
from tidebook.log.embedded.key_runs import chunk_of
from tidebook.log.port import Batch, Record

_PLACE = """SELECT p.id FROM topic t JOIN partition p ON p.topic_id = t.topic_id WHERE t.name = ? AND p.number = ?"""
_BOUNDS = "SELECT id, start_offset, next_offset, indexed_to FROM partition WHERE id = ? AND topic_id IS NOT NULL"
_CHUNKS = "SELECT id, time_ms, body FROM chunk WHERE id >= ? AND id < ? ORDER BY id"
_CHUNK = "SELECT id, time_ms, body FROM chunk WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"


_TRIES_MAX = 10


class Page(NamedTuple):
    """What a reader asks for."""

    topic: str
    partition: int
    start: int
    stop: int
    limit: int
    limit_bytes: int


class Reading:
    """Reads pages from a thread's connection, each with as few statements as it can."""

    def __init__(self) -> None:
        #: An id is never given to another partition, and its row loses its topic when that is deleted.
        self._ids: dict[tuple[str, int], int] = {}
        self._index = KeyIndex()

    def bounds(self, connection: apsw.Connection, topic: str, partition: int) -> Bounds:
        """The bounds of a partition now."""
        at = (topic, partition)
        id = self._ids.get(at)
        row = None if id is None else connection.execute(_BOUNDS, (id,)).fetchone()
        if row is None:
            found = connection.execute(_PLACE, at).fetchone()
            if found is not None:
                self._ids[at] = found[0]
                row = connection.execute(_BOUNDS, found).fetchone()
            if row is None:
                self._ids.pop(at, None)
                raise NotFound(f"the log has no partition {partition} of topic {topic!r}")
        return Bounds._make(row)

    def page(self, connection: apsw.Connection, page: Page, key: bytes | None) -> Batch:
        """A page of records.

        Bounds, index and records are read one after another, and a truncate or a merge of runs may fall between them.
        Offsets have no holes here, so what is missing then shows it, and the bounds are read again.
        """
        for _ in range(_TRIES_MAX):
            at = self.bounds(connection, page.topic, page.partition)
            if page.start < at.start:
                raise LogLost(topic=page.topic, partition=page.partition, first=page.start, last=at.start - 1)
            stop = min(page.stop, at.end)
            if page.start >= stop:
                return Batch((), page.start)
            if key is None:
                records = _scan(connection, at.id, page.start, stop)
            else:
                offsets = self._index.offsets(connection, at, key, page.start, stop)
                records = _pick(connection, at.id, key, offsets)
            try:
                return _fill(records, stop, page.limit, page.limit_bytes)
            except Moved:
                pass
        raise Corrupt(f"{page.topic}/{page.partition}: records are missing from the log: restore a copy of log.db")


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
    low, at = base(partition_id), start
    rows = connection.execute(_CHUNKS, (chunk_of(connection, low, start), low + stop))
    try:
        for id, time_ms, body in rows:
            if id - low > at:
                raise Moved
            for offset, packed in enumerate(unpack(body), id - low):
                if start <= offset < stop:
                    yield Record(offset, time_ms, packed.key, packed.value, packed.headers)
                    at = offset + 1
    finally:
        rows.close()  # a page that is full leaves some behind
    if at < stop:
        raise Moved


def _pick(connection: apsw.Connection, partition_id: int, key: bytes, offsets: Iterator[int]) -> Iterator[Record]:
    low = base(partition_id)
    first = time_ms = 0
    chunk: list[Packed] = []
    for offset in offsets:
        if not 0 <= offset - first < len(chunk):
            row = connection.execute(_CHUNK, (low, low + offset)).fetchone()
            if row is None:
                raise Moved
            first, time_ms, chunk = row[0] - low, row[1], unpack(row[2])
            if offset - first >= len(chunk):
                raise Moved
        packed = chunk[offset - first]
        if packed.key == key:
            yield Record(offset, time_ms, key, packed.value, packed.headers)
