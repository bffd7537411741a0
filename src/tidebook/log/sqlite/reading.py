"""Read pages of records from `log.db`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import apsw

from tidebook.core.errors import Corrupt, LogLost, NotFound
from tidebook.log.port import Record, RecordPage
from tidebook.log.sqlite.chunk_directory import ChunkFinder, chunks
from tidebook.log.sqlite.chunks import BoundsChanged, Packed, PartitionBounds, unpack
from tidebook.log.sqlite.key_index import KeyIndex

_FIND_ID = "SELECT p.id FROM topic t JOIN partition p ON p.topic_id = t.topic_id WHERE t.name = ? AND p.number = ?"
_BOUNDS = (
    "SELECT id, start_offset, next_offset, indexed_to, recent FROM partition WHERE id = ? AND topic_id IS NOT NULL"
)


_ATTEMPTS_MAX = 10


class PageRequest(NamedTuple):
    """The arguments of a read."""

    topic: str
    partition: int
    start: int
    stop: int
    limit: int
    limit_bytes: int


class LogReader:
    """Reads pages through a thread's connection, with as few statements as possible."""

    def __init__(self) -> None:
        #: A cache of partition ids. Ids are never reused, and a deleted partition is recognized by its NULL topic.
        self._ids: dict[tuple[str, int], int] = {}
        self._index = KeyIndex()

    def bounds(self, connection: apsw.Connection, topic: str, partition: int) -> PartitionBounds:
        """Return the current bounds of a partition; raise NotFound if there is none."""
        name = (topic, partition)
        id = self._ids.get(name)
        row = None if id is None else connection.execute(_BOUNDS, (id,)).fetchone()
        if row is None:
            found = connection.execute(_FIND_ID, name).fetchone()
            if found is not None:
                self._ids[name] = found[0]
                row = connection.execute(_BOUNDS, found).fetchone()
            if row is None:
                self._ids.pop(name, None)
                raise NotFound(f"the log has no partition {partition} of topic {topic!r}")
        return PartitionBounds._make(row)

    def page(self, connection: apsw.Connection, page: PageRequest, key: bytes | None) -> RecordPage:
        """Return a page of records; raise LogLost if it starts below the partition's start.

        Bounds, index and records are read by separate statements, and a truncation or a merge of runs may happen
        between them. The offsets of this log have no gaps, so a missing record reveals that: read the bounds again.
        """
        for _ in range(_ATTEMPTS_MAX):
            bounds = self.bounds(connection, page.topic, page.partition)
            if page.start < bounds.start:
                raise LogLost(topic=page.topic, partition=page.partition, first=page.start, last=bounds.start - 1)
            stop = min(page.stop, bounds.end)
            if page.start >= stop:
                return RecordPage((), page.start)
            if key is None:
                records = _scan(connection, bounds, page.start, stop)
            else:
                offsets = self._index.offsets(connection, bounds, key, page.start, stop)
                records = _select(connection, bounds, key, offsets)
            try:
                return _fill(records, stop, page.limit, page.limit_bytes)
            except BoundsChanged:
                pass
        raise Corrupt(f"{page.topic}/{page.partition}: records are missing from the log: restore a copy of log.db")


def _fill(records: Iterator[Record], stop: int, limit: int, limit_bytes: int) -> RecordPage:
    taken: list[Record] = []
    size_bytes = 0
    for record in records:
        size_bytes += len(record.value or b"")
        if taken and size_bytes > limit_bytes:
            return RecordPage(tuple(taken), taken[-1].offset + 1)
        taken.append(record)
        if len(taken) >= limit:
            return RecordPage(tuple(taken), record.offset + 1)
    return RecordPage(tuple(taken), stop)


def _scan(connection: apsw.Connection, bounds: PartitionBounds, start: int, stop: int) -> Iterator[Record]:
    reached = start
    for chunk in chunks(connection, bounds, start, stop):
        if chunk.first > reached:
            raise BoundsChanged
        for offset, packed in enumerate(unpack(chunk.body), chunk.first):
            if start <= offset < stop:
                yield Record(offset, chunk.time_ms, packed.key, packed.value, packed.headers)
                reached = offset + 1
    if reached < stop:
        raise BoundsChanged


def _select(
    connection: apsw.Connection, bounds: PartitionBounds, key: bytes, offsets: Iterator[int]
) -> Iterator[Record]:
    finder = ChunkFinder(connection, bounds)
    first = time_ms = 0
    records: list[Packed] = []
    for offset in offsets:
        if not 0 <= offset - first < len(records):
            first, time_ms, body = finder.find(offset)
            records = unpack(body)
            if offset - first >= len(records):
                raise BoundsChanged
        packed = records[offset - first]
        if packed.key == key:
            yield Record(offset, time_ms, key, packed.value, packed.headers)
