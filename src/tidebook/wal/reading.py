"""Reading a region: what was written and is not marked deleted, as of one offset."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping

from tidebook.core.errors import Corrupt, LogLost, Truncated
from tidebook.wal.cursor import Sieve, table_ranges
from tidebook.wal.entry import Entry
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.meta import RegionMeta
from tidebook.wal.topics import RegionTopics

#: Records of one fetch.
FETCH_MAX = 1000


async def read_region(topics: RegionTopics, meta: RegionMeta, *, from_offset: int = 0) -> AsyncIterator[list[Entry]]:
    """All entries in the order they were written, a list for each fetch. `meta` must be frozen."""
    offsets = range(from_offset, meta.next_offset)
    mappings = {table: held.mapping for table, held in meta.tables.items()}
    if from_offset:
        mappings = {table: mapping.within(offsets=offsets) for table, mapping in mappings.items()}
    async for entries in read_mapped(topics, mappings, [(max(meta.first_offset, from_offset), meta.next_offset)]):
        yield entries


async def read_table(
    topics: RegionTopics, meta: RegionMeta, *, table: int, start: int = 0
) -> AsyncIterator[list[Entry]]:
    """One table's entries from a sequence number on. `meta` must be frozen."""
    held = meta.tables.get(table)
    if held is None:
        return
    mapping = held.mapping.within(seqs=range(start, held.next_seq_num))
    async for entries in read_mapped(topics, {table: mapping}, table_ranges(mapping)):
        yield entries


async def read_mapped(
    topics: RegionTopics, mappings: Mapping[int, SeqOffsets], ranges: Iterable[tuple[int, int]]
) -> AsyncIterator[list[Entry]]:
    """The entries that the mappings name; `ranges` are the offsets where they lie."""
    sieve = Sieve(mappings)
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
