"""Select the valid entries of records by the mappings of their tables, without folding the log again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import repeat

from tidebook.core.errors import Corrupt
from tidebook.wal.entry import WalEntry
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.record import Write, decode_record, payloads_of

#: Two records of a table with more offsets than this between them are fetched by separate reads.
GAP_MAX = 64


class EntryFilter:
    """Extract the valid entries from records in offset order, and expose the next offset, so that gaps are detected."""

    def __init__(self, mappings: Mapping[int, SeqOffsets]) -> None:
        self._batches = {table: mapping.batches() for table, mapping in mappings.items()}
        #: A heap of the next batch of each table: offset, table, first, stop.
        self._due: list[tuple[int, int, int, int]] = []
        for table in mappings:
            self._advance(table)

    def next_offset(self) -> int | None:
        """Return the offset of the next record with a valid entry; None after the last one."""
        return self._due[0][0] if self._due else None

    def runs(self, value: bytes) -> Iterator[list[WalEntry]]:
        """Yield the valid entries of the record at `next_offset()`, whose value this is, in runs of one table."""
        offset = self._due[0][0]
        wanted: dict[int, tuple[int, int]] = {}
        while self._due and self._due[0][0] == offset:
            _, table, first, stop = heappop(self._due)
            wanted[table] = (first, stop)
            self._advance(table)
        record = decode_record(value)
        if not isinstance(record, Write):
            raise Corrupt(f"the record at offset {offset} is not a write, but a table refers to it")
        for part, payloads in payloads_of(record, value):
            first, stop = wanted.get(part.table, (0, 0))
            begin, end = max(first, part.first), min(stop, part.first + len(payloads))
            if begin < end:
                if end - begin < len(payloads):  # some of its entries are marked deleted or not requested
                    payloads = payloads[begin - part.first : end - part.first]
                yield list(map(WalEntry, repeat(part.table), range(begin, end), payloads, repeat(offset)))

    def _advance(self, table: int) -> None:
        batch = next(self._batches[table], None)
        if batch is not None:
            first, stop, offset = batch
            heappush(self._due, (offset, table, first, stop))


def table_ranges(mapping: SeqOffsets) -> Iterator[tuple[int, int]]:
    """Yield ranges of offsets that contain a table's records, without long stretches of other tables' records."""
    begin: int | None = None
    last = 0
    for _, _, offset in mapping.batches():
        if begin is not None and offset - last > GAP_MAX:
            yield begin, last + 1
            begin = None
        if begin is None:
            begin = offset
        last = offset
    if begin is not None:
        yield begin, last + 1
