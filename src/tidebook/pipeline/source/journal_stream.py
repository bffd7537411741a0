"""Journals as a Spark stream: events in the log's order as they are replicated, bounded a trigger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tidebook.core.errors import InvalidInput, LogLost, NotFound
from tidebook.core.event import decode_event
from tidebook.core.replication import EventRow
from tidebook.core.topic import TopicFacts
from tidebook.pipeline.numbering import number_events
from tidebook.pipeline.source.events import EventPage
from tidebook.pipeline.source.journals import lower, settings_of
from tidebook.pipeline.source.records import RECORDS_MAX, Offsets, Slice, bounded, slices_between
from tidebook.pipeline.source.wanted import Wanted, wanted_of
from tidebook.pipeline.status import replicated_to
from tidebook.pipeline.worker import Worker

PAGE_RECORDS = 5_000
EARLIEST, LATEST = "earliest", "latest"


class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Options: topic (needed), id, tag, startingOffsets (earliest, latest or JSON), maxRecordsPerTrigger."""

    def __init__(self, options: Mapping[str, str]) -> None:
        given = lower(options)
        self._settings = settings_of(given)
        self._wanted = wanted_of(given)
        if not self._wanted.topics:
            raise InvalidInput('readStream.format("tidebook") needs the option topic')
        self._from = given.get("startingoffsets", EARLIEST)
        self._rows = int(given.get("maxrecordspertrigger", RECORDS_MAX))
        self._target: Offsets | None = None

    # On the driver

    def initialOffset(self) -> dict[str, Any]:
        if self._from == EARLIEST:
            return self._worker().run(self._bounds(self._worker(), which=0))
        if self._from == LATEST:
            return self._worker().run(self._bounds(self._worker(), which=1))
        return msgspec.json.decode(self._from, type=Offsets)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._worker().run(self._bounds(self._worker(), which=1))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """As far as the log is replicated, for only then events have numbers."""
        self._worker().run(_check(self._worker(), start))
        ends = self._target or self._worker().run(self._bounds(self._worker(), which=1))
        ends = {
            topic: {number: max(at, ends.get(topic, {}).get(number, at)) for number, at in numbers.items()}
            for topic, numbers in start.items()
        }
        if isinstance(limit, ReadAllAvailable):
            return ends
        return bounded(start, ends, limit.max_rows if isinstance(limit, ReadMaxRows) else self._rows)

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._worker().run(self._bounds(self._worker(), which=1))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return slices_between(start, end)

    def _worker(self) -> Worker:
        return Worker.of(self._settings)

    async def _bounds(self, worker: Worker, *, which: int) -> Offsets:
        """Where the log begins (0), or where replication stands (1)."""
        log, store = await worker.log(), await worker.store()
        found: Offsets = {}
        for topic in sorted(self._wanted.topics or ()):
            facts = await _facts(worker, topic)
            found[topic] = {}
            for number in range(facts.partitions):
                replicated = replicated_to(await store.pointer(topic, number), facts.epoch)
                found[topic][str(number)] = replicated if which else min(await log.start(topic, number), replicated)
        return found

    # In a task

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Slice):
            return
        worker = self._worker()
        facts = worker.run(_facts(worker, partition.topic))
        page = EventPage(partition.topic)
        start = partition.start
        while start < partition.stop:
            start, events = worker.run(_events(worker, partition, facts, start))
            taken = [(id, row) for id, row in events if _takes(self._wanted, id, row)]
            page.add([id for id, _ in taken], partition.partition, [row for _, row in taken])
            if page.full:
                yield from page.take()
        yield from page.take()


def _takes(wanted: Wanted, id: str, row: EventRow) -> bool:
    if not wanted.takes(id, row.seq_nr, row.timestamp_ms):
        return False
    return wanted.tag is None or wanted.tag in decode_event(row.kept).tags


async def _events(
    worker: Worker, slice_: Slice, facts: TopicFacts, start: int
) -> tuple[int, list[tuple[str, EventRow]]]:
    log, store = await worker.log(), await worker.store()
    page = await log.read(slice_.topic, slice_.partition, start=start, stop=slice_.stop, limit=PAGE_RECORDS)
    numbered = await number_events(store, slice_.topic, slice_.partition, page.records, facts)
    return page.next_offset, numbered


async def _facts(worker: Worker, topic: str) -> TopicFacts:
    facts = await (await worker.store()).facts(topic)
    if facts is None:
        raise NotFound(f"topic {topic}: the store has nothing of it")
    return facts


async def _check(worker: Worker, starts: Offsets) -> None:
    """A stream that retention has overtaken says so, instead of going on behind the hole."""
    log = await worker.log()
    for topic, numbers in starts.items():
        for number, start in numbers.items():
            first = await log.start(topic, int(number))
            if first > start:
                raise LogLost(
                    topic=topic, partition=int(number), first=start, last=first - 1,
                    remedy="read them from the store without a stream, and begin a stream anew behind them",
                )  # fmt: skip
