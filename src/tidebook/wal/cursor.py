"""Which payloads of a record count: told by the mappings, so a read needs neither claims nor a fold of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import repeat

from tidebook.core.errors import Corrupt
from tidebook.wal.entry import Entry
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.record import Write, decode_record, payloads_of

#: Two records of a table that lie further apart than this are fetched by two reads.
GAP_MAX = 64


class Sieve:
    """Takes the entries that count out of records, in offset order, and notices a record that is missing."""

    def __init__(self, mappings: Mapping[int, SeqOffsets]) -> None:
        self._batches = {table: mapping.batches() for table, mapping in mappings.items()}
        #: The next batch of each table: offset, table, first, stop.
        self._due: list[tuple[int, int, int, int]] = []
        for table in mappings:
            self._step(table)

    def next_offset(self) -> int | None:
        """The next record that holds an entry; None when all were seen."""
        return self._due[0][0] if self._due else None

    def runs(self, value: bytes) -> Iterator[list[Entry]]:
        """The entries that count of the record at `next_offset()`, in runs of one table."""
        offset = self._due[0][0]
        wanted: dict[int, tuple[int, int]] = {}
        while self._due and self._due[0][0] == offset:
            _, table, first, stop = heappop(self._due)
            wanted[table] = (first, stop)
            self._step(table)
        record = decode_record(value)
        if not isinstance(record, Write):
            raise Corrupt(f"the record at offset {offset} is no write, and its table says so")
        for part, payloads in payloads_of(record, value):
            first, stop = wanted.get(part.table, (0, 0))
            begin, end = max(first, part.first), min(stop, part.first + len(payloads))
            if begin < end:
                if end - begin < len(payloads):  # the mark lies within the part
                    payloads = payloads[begin - part.first : end - part.first]
                yield list(map(Entry, repeat(part.table), range(begin, end), payloads, repeat(offset)))

    def _step(self, table: int) -> None:
        batch = next(self._batches[table], None)
        if batch is not None:
            first, stop, offset = batch
            heappush(self._due, (offset, table, first, stop))


def table_ranges(mapping: SeqOffsets) -> Iterator[tuple[int, int]]:
    """Ranges of offsets that hold a table's records, without passing over much of the others'."""
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
