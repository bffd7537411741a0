"""Reading a region: what was written and is not marked deleted, as of one offset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import NamedTuple

from tidebook.core.errors import Corrupt, LogLost, Truncated
from tidebook.log.port import Record
from tidebook.wal.cursor import Sieve, table_ranges
from tidebook.wal.entry import Entry
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.meta import RegionMeta
from tidebook.wal.topics import RegionTopics

#: Records of one fetch.
FETCH_MAX = 1000

#: Entries of one table that follow one another in a record.
Run = list[Entry]


class Page(NamedTuple):
    """What one fetch gave, and how far the read is: offsets done, offsets in all."""

    runs: list[Run]
    done: int
    whole: int


async def read_region(topics: RegionTopics, meta: RegionMeta, *, from_offset: int = 0) -> AsyncIterator[list[Run]]:
    """All entries in the order they were written, in runs of one table, for each fetch. `meta` must be frozen."""
    offsets = range(from_offset, meta.next_offset)
    mappings = {table: held.mapping for table, held in meta.tables.items()}
    if from_offset:
        mappings = {table: mapping.within(offsets=offsets) for table, mapping in mappings.items()}
    async for runs in read_mapped(topics, mappings, [(max(meta.first_offset, from_offset), meta.next_offset)]):
        yield runs


async def read_table(topics: RegionTopics, meta: RegionMeta, *, table: int, start: int = 0) -> AsyncIterator[list[Run]]:
    """One table's entries from a sequence number on. `meta` must be frozen."""
    held = meta.tables.get(table)
    if held is None:
        return
    mapping = held.mapping.within(seqs=range(start, held.next_seq_num))
    async for runs in read_mapped(topics, {table: mapping}, table_ranges(mapping)):
        yield runs


async def read_mapped(
    topics: RegionTopics, mappings: Mapping[int, SeqOffsets], ranges: Iterable[tuple[int, int]]
) -> AsyncIterator[list[Run]]:
    """The entries that the mappings name; `ranges` are the offsets where they lie."""
    sieve = Sieve(mappings)
    for start, stop in ranges:
        if sieve.next_offset() is None:
            return
        pages = _pages(topics, start, stop)
        try:
            async for records in pages:
                runs = _take(topics, sieve, records)
                if runs:
                    yield runs
        finally:
            await pages.aclose()
    left = sieve.next_offset()
    if left is not None:
        raise _missing(topics, left)


def _take(topics: RegionTopics, sieve: Sieve, records: Iterable[Record]) -> list[Run]:
    runs: list[Run] = []
    for record in records:
        wanted = sieve.next_offset()
        if wanted is None:
            break
        if record.offset == wanted:
            runs += sieve.runs(record.value or b"")
        elif record.offset > wanted:
            raise _missing(topics, wanted)
    return runs


async def _pages(topics: RegionTopics, start: int, stop: int) -> AsyncGenerator[tuple[Record, ...], None]:
    """The records of a range; the next page is fetched while this one is used."""
    fetching = asyncio.ensure_future(topics.read(start=start, stop=stop, limit=FETCH_MAX))
    try:
        while True:
            try:
                records, next_start = await fetching
            except LogLost as error:
                raise Truncated(
                    f"{topics.data}: entries from offset {start} on were marked deleted and cleaned while they were "
                    "read: start the read again"
                ) from error
            start = next_start
            if start >= stop or not records:
                yield records
                return
            fetching = asyncio.ensure_future(topics.read(start=start, stop=stop, limit=FETCH_MAX))
            yield records
    finally:
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)


def _missing(topics: RegionTopics, offset: int) -> Corrupt:
    return Corrupt(f"{topics.data}: the log no longer holds the record at offset {offset}, which was acknowledged")
