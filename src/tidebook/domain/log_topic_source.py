"""All events of topics, read from the log: for stores that do not order the events of a topic.

Only replicated records are read, and their numbers are looked up in the store. The log must still hold what a slice has
not applied: otherwise `LogLost` is raised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from tidebook.core.errors import Corrupt, LogLost, UnknownVersion
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH
from tidebook.core.record import read_record
from tidebook.core.replication_plan import EventRow, advance_time, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.domain.event_source import At, SourcePage, SourcePosition, SourceRow, merged_pages
from tidebook.log.port import Log, Record, read_page
from tidebook.replication.event_numbers import number_events
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import Horizons

PAGE_RECORDS: Final = 1_000


class LogTopicSource:
    """The stream of whole topics, merged from the partitions of the log in the order of the log time."""

    def __init__(self, log: Log, store: StoreWriter, horizons: Horizons, topics: frozenset[str]) -> None:
        self.topics: frozenset[str] | None = topics
        self.tags = frozenset[str]()
        self._names = sorted(topics)
        self._log = log
        self._store = store
        self._horizons = horizons

    async def pages(self, after: SourcePosition) -> AsyncIterator[SourcePage]:
        """Yield what is below the horizon, then a page without rows at the horizon."""
        horizon = await self._horizons.read(self.topics)
        cursors: dict[str, _Cursor] = {}
        for topic in self._names:
            config = await self._store.topic_config(topic)
            if config is None:
                continue
            for partition in range(config.partitions):
                name = f"{topic}/{partition}"
                start = await self._start(topic, partition, config, after.log.get(name))
                stop = first_unreplicated_offset(await self._store.pointer(topic, partition), topic, partition, config)
                cursors[name] = _Cursor(
                    self._log, self._store, topic, partition, config, start, stop, horizon.time_ms, after.at
                )

        def offsets() -> dict[str, Any]:
            return {name: [cursor.config.epoch, *cursor.resume] for name, cursor in cursors.items()}

        def request(name: str, _: At) -> Any:
            return cursors[name].next_rows()

        async for rows in merged_pages(dict.fromkeys(cursors, after.at), request, _place):
            yield SourcePage([row for _, row in rows], SourcePosition(rows[-1][0], offsets()))
        if not after.at or horizon.time_ms > after.at[0]:
            yield SourcePage((), SourcePosition((horizon.time_ms,), offsets()))

    async def _start(self, topic: str, partition: int, config: TopicConfig, saved: Any) -> tuple[int, int]:
        """Return the offset to read from, and the log time before it."""
        epoch, offset, time_ms = saved or (FIRST_EPOCH, 0, 0)
        if epoch != config.epoch:  # what an earlier epoch had is only in the store
            raise Corrupt(
                f"topic {topic} is in epoch {config.epoch} and the projection in epoch {epoch}: the topic was adopted "
                "since, and the log has only the events after that: follow tags instead"
            )
        first = await self._log.start(topic, partition)
        if first > offset:
            raise LogLost(
                topic=topic, partition=partition, first=offset, last=first - 1, when="before a projection applied them",
                remedy="follow tags instead, which the store keeps, or keep the log for longer",
            )  # fmt: skip
        return offset, time_ms

    async def place(self, key: Key, partition: int, row: EventRow) -> At:
        """Return the place of an event in the stream."""
        return (row.time_ms, key.topic, row.position.epoch, row.position.offset, key.id, row.seq_nr)


class _Cursor:
    """Reads one partition, page after page, up to the replicated end and the horizon."""

    def __init__(
        self, log: Log, store: StoreWriter, topic: str, partition: int, config: TopicConfig,
        start: tuple[int, int], stop: int, until_ms: int, after: At,
    ) -> None:  # fmt: skip
        self.config = config
        #: Where a later read resumes: all rows before it were delivered, and those after it up to `at` are skipped.
        self.resume = start
        self._log = log
        self._store = store
        self._topic = topic
        self._partition = partition
        self._next = start
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
            times, time_ms = _times(page.records, time_ms, self.config)
            numbered = await number_events(self._store, self._topic, self._partition, page.records, self.config)
            rows = [self._row(id, row, times[row.position.offset]) for id, row in numbered]
            below = [row for row in rows if row.row.time_ms < self._until_ms]
            if len(below) == len(rows):
                self._next = (page.next_offset, time_ms)
            else:  # the rest waits for the horizon, and this page is read again
                self._stop = offset
            if found := [row for row in below if row.at > self._after]:
                return found

    def _row(self, id: str, row: EventRow, time_ms: int) -> SourceRow:
        at = (time_ms, self._topic, row.position.epoch, row.position.offset, id, row.seq_nr)
        return SourceRow(at, self._topic, id, self._partition, msgspec.structs.replace(row, time_ms=time_ms))


def _times(records: Any, time_ms: int, config: TopicConfig) -> tuple[dict[int, int], int]:
    """Return the log time of each record by offset, and that after the last."""
    times: dict[int, int] = {}
    record: Record
    for record in records:
        try:
            action = read_record(record.value, limit_bytes=config.limit_bytes)
        except UnknownVersion:
            continue  # replication is stopped before it
        times[record.offset] = time_ms = advance_time(time_ms, record.timestamp_ms, action)
    return times, time_ms


def _place(_: str, row: SourceRow) -> At:
    return row.at
