"""All events of topics, read from the log: for stores that do not order the events of a topic.

Only replicated records are read, and their numbers are looked up in the store. Events that the log no longer
has, because of its retention or an earlier epoch, come from a scan of the store up to the horizon at which it began.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import msgspec

from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH
from tidebook.core.record import read_record
from tidebook.core.replication_plan import EventRow, advance_time, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.domain.event_source import At, SourcePage, SourcePosition, SourceRow, merged_pages
from tidebook.domain.topic_scan import PLACE_SIZE, TopicScan, in_scan, topic_place
from tidebook.log.port import Log, Record, read_page
from tidebook.replication.event_numbers import number_events
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import Horizons

PAGE_RECORDS: Final = 1_000
#: How many records are numbered at once to find the log time of a single one.
NUMBERED: Final = 50
#: The log time before the first record of the log, if it has lost earlier ones.
UNKNOWN_MS: Final = -1


class LogTopicSource:
    """The stream of whole topics, merged from the partitions of the log in the order of the log time."""

    def __init__(self, log: Log, store: StoreWriter, horizons: Horizons, topics: frozenset[str]) -> None:
        self.topics: frozenset[str] | None = topics
        self.tags = frozenset[str]()
        self._names = sorted(topics)
        self._log = log
        self._store = store
        self._horizons = horizons
        #: The scan in progress.
        self._scan: TopicScan | None = None

    async def pages(self, after: SourcePosition) -> AsyncIterator[SourcePage]:
        """Yield the pages of an `EventSource`; a scan of the store begins and ends with a page that jumps."""
        horizon = await self._horizons.read(self.topics)
        starts, is_complete = await self._starts(after.log)
        if in_scan(after.at):
            scan = self._scan_of(after.at[:PLACE_SIZE], after.at[PLACE_SIZE])
            if horizon.time_ms < scan.until_ms:
                return
            async with aclosing(scan.pages(self._names, after)) as pages:
                async for page in pages:
                    yield page
            starts, _ = await self._starts(after.log)
            offsets = {each.name: await self._after_scan(each, scan.until_ms) for each in starts}
            yield SourcePage((), SourcePosition((scan.until_ms,), offsets), jumps=True)
            return
        if not is_complete:
            # Everything the log has lost must be below the end of the scan, which waits for the horizon if necessary.
            lost_ms = [await self._time_of_first(each) or await self._pointer_ms(each) for each in starts]
            scan = self._scan_of(after.at, max(horizon.time_ms, 1 + max(lost_ms)))
            offsets = {each.name: [each.config.epoch, each.first, UNKNOWN_MS] for each in starts}
            yield SourcePage((), SourcePosition(scan.place, offsets), jumps=True)
            return
        self._scan = None
        cursors = {
            each.name: _Cursor(self._log, self._store, each, horizon.time_ms, after.at, await self._stop(each))
            for each in starts
        }

        def resumes() -> dict[str, Any]:
            return {name: [cursor.config.epoch, *cursor.resume] for name, cursor in cursors.items()}

        def request(name: str, _: At) -> Any:
            return cursors[name].next_rows()

        async for rows in merged_pages(dict.fromkeys(cursors, after.at), request, _place):
            yield SourcePage([row for _, row in rows], SourcePosition(rows[-1][0], resumes()))
        if not after.at or horizon.time_ms > after.at[0]:
            yield SourcePage((), SourcePosition((horizon.time_ms,), resumes()))

    def _scan_of(self, base: At, until_ms: int) -> TopicScan:
        """Return the scan after a position; a scan in progress already has its ids."""
        scan = TopicScan(self._store, base, until_ms)
        if self._scan is None or self._scan.place != scan.place:
            self._scan = scan
        return self._scan

    async def _after_scan(self, start: _Start, until_ms: int) -> list[int]:
        """Return the position from which the log is read after a scan.

        Events lost since the scan began must be below the end of the scan too; otherwise another scan follows.
        """
        lost_since = start.first > start.offset
        time_ms = await self._time_of_first(start) if lost_since else None
        offset = start.first if time_ms is not None and time_ms < until_ms else start.offset
        return [start.config.epoch, offset, UNKNOWN_MS]

    async def _time_of_first(self, start: _Start) -> int | None:
        """Return the log time of the first event in the log, None if there is none; earlier events are not later."""
        cursor = _Cursor(self._log, self._store, start, 0, (), await self._stop(start))
        return await cursor.find_first()

    async def _pointer_ms(self, start: _Start) -> int:
        pointer = await self._store.pointer(start.topic, start.partition)
        return -1 if pointer is None else pointer.time_ms

    async def _starts(self, saved: Mapping[str, Any]) -> tuple[list[_Start], bool]:
        """Return the start of reading each partition, and whether the log has everything after it."""
        starts, is_complete = [], True
        for topic in self._names:
            config = await self._store.topic_config(topic)
            if config is None:
                continue
            for partition in range(config.partitions):
                epoch, offset, time_ms = saved.get(f"{topic}/{partition}") or (FIRST_EPOCH, 0, 0)
                first = await self._log.start(topic, partition)
                starts.append(_Start(topic, partition, config, first, offset, time_ms))
                # The events of an earlier epoch are only in the store.
                is_complete = is_complete and epoch == config.epoch and first <= offset
        return starts, is_complete

    async def _stop(self, start: _Start) -> int:
        pointer = await self._store.pointer(start.topic, start.partition)
        return first_unreplicated_offset(pointer, start.topic, start.partition, start.config)

    async def place(self, key: Key, partition: int, row: EventRow) -> At:
        return topic_place(key.topic, key.id, row)


class _Start(NamedTuple):
    """The start of reading one partition: the log's first offset, the next offset, and the log time before that."""

    topic: str
    partition: int
    config: TopicConfig
    first: int
    offset: int
    time_ms: int

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.partition}"


class _Cursor:
    """Reads one partition, page after page, up to the replicated end and the horizon."""

    def __init__(self, log: Log, store: StoreWriter, start: _Start, until_ms: int, after: At, stop: int) -> None:
        self.config = start.config
        #: Where a later read resumes: all rows before it were delivered, and those after it up to `at` are skipped.
        self.resume = (start.offset, start.time_ms)
        self._log = log
        self._store = store
        self._topic = start.topic
        self._partition = start.partition
        self._first = start.first
        self._next = self.resume
        self._stop = stop
        self._until_ms = until_ms
        self._after = after

    async def next_rows(self) -> list[SourceRow]:
        """Return the next events below the horizon, none at the end."""
        while True:
            self.resume = (offset, time_ms) = self._next
            if offset >= self._stop:
                return []
            page = await read_page(
                self._log, self._topic, self._partition, start=offset, stop=self._stop, limit=PAGE_RECORDS
            )
            records: Sequence[Record] = page.records
            if time_ms == UNKNOWN_MS:
                records, time_ms = await self._find_time(records)
            times, time_ms = _times(records, time_ms, self.config)
            # Records before `after` need no numbers; after a scan these are most of the log.
            new = [each for each in records if times.get(each.offset, 0) >= (self._after[0] if self._after else 0)]
            numbered = await number_events(self._store, self._topic, self._partition, new, self.config)
            rows = [self._row(id, row, times[row.position.offset]) for id, row in numbered]
            below = [row for row in rows if row.row.time_ms < self._until_ms]
            if len(below) == len(rows):
                self._next = (page.next_offset, time_ms)
            else:  # the rest waits for the horizon, and this page is read again
                self._stop = offset
            if found := [row for row in below if row.at > self._after]:
                return found

    async def find_first(self) -> int | None:
        """Return the log time of the first event in the log, None if there is none."""
        offset = self._first
        while offset < self._stop:
            page = await read_page(
                self._log, self._topic, self._partition, start=offset, stop=self._stop, limit=PAGE_RECORDS
            )
            _, time_ms = await self._find_time(page.records)
            if time_ms != UNKNOWN_MS:
                return time_ms
            offset = page.next_offset
        return None

    async def _find_time(self, records: Sequence[Record]) -> tuple[Sequence[Record], int]:
        """Return the records from the first one with an event, and its log time, which only the store has.

        The log time before the log's first record is lost with the records that determined it. Without an event there
        is no record to deliver, and the time is still unknown.
        """
        for begin in range(0, len(records), NUMBERED):
            some = records[begin : begin + NUMBERED]
            for id, row in await number_events(self._store, self._topic, self._partition, some, self.config):
                key = Key(self._topic, id)
                head = await self._store.head(key)
                if head is None:
                    continue  # purged in the meantime
                stored = await self._store.events(key, head, after=row.seq_nr - 1, to=row.seq_nr, limit=1)
                if stored and stored[0].position == row.position:
                    return [each for each in records if each.offset >= row.position.offset], stored[0].time_ms
        return (), UNKNOWN_MS

    def _row(self, id: str, row: EventRow, time_ms: int) -> SourceRow:
        at = (time_ms, self._topic, row.position.epoch, row.position.offset, id, row.seq_nr)
        return SourceRow(at, self._topic, id, self._partition, msgspec.structs.replace(row, time_ms=time_ms))


def _times(records: Sequence[Record], time_ms: int, config: TopicConfig) -> tuple[dict[int, int], int]:
    """Return the log time of each record by offset, and that after the last."""
    times: dict[int, int] = {}
    for record in records:
        action = read_record(record.value, limit_bytes=config.limit_bytes)
        times[record.offset] = time_ms = advance_time(time_ms, record.timestamp_ms, action)
    return times, time_ms


def _place(_: str, row: SourceRow) -> At:
    return row.at
