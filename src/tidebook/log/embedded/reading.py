"""Reading pages of records, each within one moment of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import apsw

from tidebook.core.errors import Corrupt, LogLost, NotFound
from tidebook.log.embedded.chunks import Bounds, Moved, Packed, unpack
from tidebook.log.embedded.directory import Finder, chunks
from tidebook.log.embedded.key_index import KeyIndex
from tidebook.log.port import Batch, Record

_PLACE = """SELECT p.id FROM topic t JOIN partition p ON p.topic_id = t.topic_id WHERE t.name = ? AND p.number = ?"""
_BOUNDS = (
    "SELECT id, start_offset, next_offset, indexed_to, recent FROM partition WHERE id = ? AND topic_id IS NOT NULL"
)


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
                records = _scan(connection, at, page.start, stop)
            else:
                offsets = self._index.offsets(connection, at, key, page.start, stop)
                records = _pick(connection, at, key, offsets)
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


def _scan(connection: apsw.Connection, at: Bounds, start: int, stop: int) -> Iterator[Record]:
    reached = start
    for chunk in chunks(connection, at, start, stop):
        if chunk.first > reached:
            raise Moved
        for offset, packed in enumerate(unpack(chunk.body), chunk.first):
            if start <= offset < stop:
                yield Record(offset, chunk.time_ms, packed.key, packed.value, packed.headers)
                reached = offset + 1
    if reached < stop:
        raise Moved


def _pick(connection: apsw.Connection, at: Bounds, key: bytes, offsets: Iterator[int]) -> Iterator[Record]:
    finder = Finder(connection, at)
    first = time_ms = 0
    records: list[Packed] = []
    for offset in offsets:
        if not 0 <= offset - first < len(records):
            first, time_ms, body = finder.find(offset)
            records = unpack(body)
            if offset - first >= len(records):
                raise Moved
        packed = records[offset - first]
        if packed.key == key:
            yield Record(offset, time_ms, key, packed.value, packed.headers)
