"""Read the entries of a region that are not marked deleted, as of one state of its tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import NamedTuple

from tidebook.core.errors import Corrupt, LogLost, Truncated
from tidebook.log.port import Record
from tidebook.wal.entry import WalEntry
from tidebook.wal.entry_filter import EntryFilter, table_ranges
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.meta import RegionMeta
from tidebook.wal.topics import RegionTopics

#: The most records that one fetch returns.
FETCH_MAX = 1000

#: Consecutive entries of one table in one record.
Run = list[WalEntry]


class EntryPage(NamedTuple):
    """The entries of one fetch, and the progress of the read: offsets done, offsets in total."""

    runs: list[Run]
    done: int
    total: int


def read_region(topics: RegionTopics, meta: RegionMeta, *, from_offset: int = 0) -> AsyncGenerator[list[Run], None]:
    """Yield the entries of all tables in log order: for each fetch, a list of runs. `meta` must be frozen."""
    offsets = range(from_offset, meta.next_offset)
    mappings = {table: table_meta.mapping for table, table_meta in meta.tables.items()}
    if from_offset:
        mappings = {table: mapping.within(offsets=offsets) for table, mapping in mappings.items()}
    return read_mapped(topics, mappings, [(max(meta.first_offset, from_offset), meta.next_offset)])


def read_table(
    topics: RegionTopics, meta: RegionMeta, *, table: int, start: int = 0
) -> AsyncGenerator[list[Run], None]:
    """Yield one table's entries from sequence number `start` on. `meta` must be frozen."""
    table_meta = meta.tables.get(table)
    if table_meta is None:
        return read_mapped(topics, {}, ())
    mapping = table_meta.mapping.within(seqs=range(start, table_meta.next_seq_num))
    return read_mapped(topics, {table: mapping}, table_ranges(mapping))


async def read_mapped(
    topics: RegionTopics, mappings: Mapping[int, SeqOffsets], ranges: Iterable[tuple[int, int]]
) -> AsyncGenerator[list[Run], None]:
    """Yield the entries of the mappings, from the given ranges of offsets; raise `Corrupt` if a record is missing."""
    entry_filter = EntryFilter(mappings)
    for start, stop in ranges:
        if entry_filter.next_offset() is None:
            return
        pages = _pages(topics, start, stop)
        try:
            async for records in pages:
                runs = _filter(topics, entry_filter, records)
                if runs:
                    yield runs
        finally:
            await pages.aclose()
    unread = entry_filter.next_offset()
    if unread is not None:
        raise _missing(topics, unread)


def _filter(topics: RegionTopics, entry_filter: EntryFilter, records: Iterable[Record]) -> list[Run]:
    runs: list[Run] = []
    for record in records:
        wanted = entry_filter.next_offset()
        if wanted is None:
            break
        if record.offset == wanted:
            runs += entry_filter.runs(record.value or b"")
        elif record.offset > wanted:
            raise _missing(topics, wanted)
    return runs


async def _pages(topics: RegionTopics, start: int, stop: int) -> AsyncGenerator[tuple[Record, ...], None]:
    """Yield the records of a range in pages, and prefetch the next page while the caller uses this one."""
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
