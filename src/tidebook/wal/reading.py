"""Reading a region: what was written and is not marked deleted, as of one offset."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from tidebook.core.errors import Corrupt, LogLost, Truncated
from tidebook.wal.cursor import Sieve, table_ranges
from tidebook.wal.entry import Entry
from tidebook.wal.meta import RegionMeta
from tidebook.wal.topics import RegionTopics

#: Records of one fetch.
FETCH_MAX = 1000


async def read_region(topics: RegionTopics, meta: RegionMeta, *, from_offset: int = 0) -> AsyncIterator[list[Entry]]:
    """All entries in the order they were written, a list for each fetch. `meta` must be frozen."""
    start = max(meta.first_offset, meta.truncated_to, from_offset)
    sieve = Sieve(meta, from_offset=from_offset)
    async for entries in _through(topics, sieve, [(start, meta.next_offset)]):
        yield entries


async def read_table(
    topics: RegionTopics, meta: RegionMeta, *, table: int, start: int = 0
) -> AsyncIterator[list[Entry]]:
    """One table's entries from a sequence number on. `meta` must be frozen."""
    held = meta.tables.get(table)
    if held is None:
        return
    sieve = Sieve(meta, tables={table: start})
    async for entries in _through(topics, sieve, table_ranges(held.mapping, start)):
        yield entries


async def _through(topics: RegionTopics, sieve: Sieve, ranges: Iterable[tuple[int, int]]) -> AsyncIterator[list[Entry]]:
    for begin, stop in ranges:
        start = begin
        while start < stop and sieve.next_offset() is not None:
            try:
                records, start = await topics.read(start=start, stop=stop, limit=FETCH_MAX)
            except LogLost as error:
                raise Truncated(
                    f"{topics.data}: entries from offset {start} on were marked deleted and cleaned while they were "
                    "read: start the read again"
                ) from error
            entries: list[Entry] = []
            for record in records:
                wanted = sieve.next_offset()
                if wanted is None:
                    break
                if record.offset == wanted:
                    entries += sieve.entries(record.value or b"")
                elif record.offset > wanted:
                    raise _missing(topics, wanted)
            if entries:
                yield entries
            if not records and start < stop:
                break
    left = sieve.next_offset()
    if left is not None:
        raise _missing(topics, left)


def _missing(topics: RegionTopics, offset: int) -> Corrupt:
    return Corrupt(f"{topics.data}: the log no longer holds the record at offset {offset}, which was acknowledged")
