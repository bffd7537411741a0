"""Read the entries of a region that are not marked deleted, as of one state of its tables, and replay them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from heapq import merge
from itertools import groupby, repeat
from operator import itemgetter
from typing import NamedTuple

from tidebook.core.errors import Corrupt, InvalidInput, LogLost, Truncated
from tidebook.log.port import Record
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.meta import RegionMeta
from tidebook.wal.record import WalEntry, Write, decode_record, payloads_of, table_id
from tidebook.wal.topics import RegionTopics

#: The maximum number of records that one fetch returns.
FETCH_MAX = 1000
#: A read of one table skips a stretch without its records if that is longer than this.
GAP_MAX = 64

#: Consecutive entries of one table in one record.
Run = list[WalEntry]
Handler = Callable[[WalEntry], Awaitable[None] | None]
#: Called with the progress of a replay: offsets done, offsets in total.
OnProgress = Callable[[int, int], None]


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
    return read_mapped(topics, {table: mapping}, _table_ranges(mapping))


async def read_mapped(
    topics: RegionTopics, mappings: Mapping[int, SeqOffsets], ranges: Iterable[tuple[int, int]]
) -> AsyncGenerator[list[Run], None]:
    """Yield the entries of the mappings, from the given ranges of offsets; raise `Corrupt` if a record is missing."""
    due = _due_records(mappings)
    wanted = next(due, None)
    for start, stop in ranges:
        if wanted is None:
            return
        async with aclosing(_pages(topics, start, stop)) as pages:
            async for records in pages:
                runs: list[Run] = []
                for record in records:
                    if wanted is None:
                        break
                    if record.offset > wanted[0]:
                        raise _missing(topics, wanted[0])
                    if record.offset == wanted[0]:
                        runs += _valid_runs(record, wanted[1])
                        wanted = next(due, None)
                if runs:
                    yield runs
    if wanted is not None:
        raise _missing(topics, wanted[0])


def _due_records(mappings: Mapping[int, SeqOffsets]) -> Iterator[tuple[int, dict[int, tuple[int, int]]]]:
    """Yield each offset with wanted entries, in log order, and the range (first, stop) of their numbers by table."""

    def batches(table: int, mapping: SeqOffsets) -> Iterator[tuple[int, int, int, int]]:
        for first, stop, offset in mapping.batches():
            yield offset, table, first, stop

    in_order = merge(*(batches(table, mapping) for table, mapping in mappings.items()))
    for offset, parts in groupby(in_order, key=itemgetter(0)):
        yield offset, {table: (first, stop) for _, table, first, stop in parts}


def _valid_runs(stored: Record, wanted: Mapping[int, tuple[int, int]]) -> Iterator[Run]:
    """Yield the entries of a record that have these sequence numbers, in runs of one table."""
    value = stored.value or b""
    record = decode_record(value)
    if not isinstance(record, Write):
        raise Corrupt(f"the record at offset {stored.offset} is not a write, but a table refers to it")
    for part, payloads in payloads_of(record, value):
        first, stop = wanted.get(part.table, (0, 0))
        begin, end = max(first, part.first), min(stop, part.first + len(payloads))
        if begin < end:
            if end - begin < len(payloads):  # some of its entries are marked deleted or not requested
                payloads = payloads[begin - part.first : end - part.first]
            yield list(map(WalEntry, repeat(part.table), range(begin, end), payloads, repeat(stored.offset)))


def _table_ranges(mapping: SeqOffsets) -> Iterator[tuple[int, int]]:
    """Yield ranges of offsets that contain a table's records, without long stretches of other tables' records."""
    begin = last = None
    for _, _, offset in mapping.batches():
        if begin is None or last is None:
            begin = offset
        elif offset - last > GAP_MAX:
            yield begin, last + 1
            begin = offset
        last = offset
    if begin is not None and last is not None:
        yield begin, last + 1


async def _pages(topics: RegionTopics, start: int, stop: int) -> AsyncGenerator[tuple[Record, ...], None]:
    """Yield the records of a range in pages, and prefetch the next page while the caller uses this one."""
    fetching = asyncio.ensure_future(topics.read(start=start, stop=stop, limit=FETCH_MAX))
    try:
        while True:
            try:
                page = await fetching
            except LogLost as error:
                raise Truncated(
                    f"{topics.data}: entries from offset {start} on were marked deleted and cleaned while they were "
                    "read: start the read again"
                ) from error
            start = page.next_offset
            if start >= stop or not page.records:
                yield page.records
                return
            fetching = asyncio.ensure_future(topics.read(start=start, stop=stop, limit=FETCH_MAX))
            yield page.records
    finally:
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)


def _missing(topics: RegionTopics, offset: int) -> Corrupt:
    return Corrupt(f"{topics.data}: the log no longer holds the record at offset {offset}, which was acknowledged")


class Replay:
    """Chooses the handler of each run of entries and counts them; the caller invokes the handlers in its own thread."""

    def __init__(
        self, handlers: Mapping[int, Handler], *, other: Handler | None = None, progress: OnProgress | None = None
    ) -> None:
        if not isinstance(handlers, Mapping):
            raise InvalidInput(f"handlers must be a mapping from table to handler, not {type(handlers).__name__}")
        given: list[tuple[str, object]] = [(f"the handler of table {table_id(t)}", h) for t, h in handlers.items()]
        given += [(name, value) for name, value in (("other", other), ("progress", progress)) if value is not None]
        for name, value in given:
            if not callable(value):
                raise InvalidInput(f"{name} must be callable, not {type(value).__name__}")
        self._handlers = handlers
        self._other = other
        self._progress = progress
        #: How many entries of each table were handled.
        self.counts: dict[int, int] = {}

    def take(self, page: EntryPage) -> Iterator[tuple[Handler, Run]]:
        """Yield (handler, run) for each run of a page that has a handler; report progress after the last one."""
        for run in page.runs:
            table = run[0].table
            handler = self._handlers.get(table, self._other)
            if handler is not None:
                yield handler, run
                self.counts[table] = self.counts.get(table, 0) + len(run)
        if self._progress is not None:
            self._progress(page.done, page.total)
