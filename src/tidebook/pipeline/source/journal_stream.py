"""Journals as a Spark stream: events in the log's order as they are replicated, bounded a trigger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tidebook.core.errors import Corrupt, InvalidInput, LogLost, NotFound
from tidebook.core.event import decode_event
from tidebook.core.replication import EventRow
from tidebook.core.topic import TopicFacts
from tidebook.pipeline.numbering import number_events
from tidebook.pipeline.source.epochs import EPOCH, epoch_of, in_epoch, numbers_of, without_epochs
from tidebook.pipeline.source.events import EventPage
from tidebook.pipeline.source.journals import lower, settings_of
from tidebook.pipeline.source.records import RECORDS_MAX, Offsets, Slice, bounded, slices_between
from tidebook.pipeline.source.wanted import Wanted, wanted_of
from tidebook.pipeline.status import replicated_to
from tidebook.pipeline.worker import Worker

PAGE_RECORDS = 5_000
EARLIEST, LATEST = "earliest", "latest"


class EpochSlice(InputPartition):
    """Records of one log partition, and the epoch that they were planned in."""

    def __init__(self, slice_: Slice, epoch: int) -> None:
        self.slice = slice_
        self.epoch = epoch


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
        return self._worker().run(_of_now(self._worker(), msgspec.json.decode(self._from, type=Offsets)))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._worker().run(self._bounds(self._worker(), which=1))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """As far as the log is replicated, for only then events have numbers."""
        self._worker().run(_check(self._worker(), start))
        found = self._target or self._worker().run(self._bounds(self._worker(), which=1))
        for topic, numbers in start.items():
            _same_epoch(topic, epoch_of(numbers), epoch_of(found.get(topic, numbers)))
        ends = {
            topic: {number: max(at, found.get(topic, {}).get(number, at)) for number, at in numbers.items()}
            for topic, numbers in start.items()
        }
        if isinstance(limit, ReadAllAvailable):
            return ends
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._rows
        stops = bounded(without_epochs(start), without_epochs(ends), rows)
        return {topic: in_epoch(numbers, epoch_of(ends[topic])) for topic, numbers in stops.items()}

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._worker().run(self._bounds(self._worker(), which=1))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        slices = slices_between(without_epochs(start), without_epochs(end))
        return [EpochSlice(each, epoch_of(start[each.topic])) for each in slices]

    def _worker(self) -> Worker:
        return Worker.of(self._settings)

    async def _bounds(self, worker: Worker, *, which: int) -> Offsets:
        """Where the log begins (0), or where replication stands (1)."""
        log, store = await worker.log(), await worker.store()
        found: Offsets = {}
        for topic in sorted(self._wanted.topics or ()):
            facts = await _facts(worker, topic)
            found[topic] = {EPOCH: facts.epoch}
            for number in range(facts.partitions):
                replicated = replicated_to(await store.pointer(topic, number), facts.epoch)
                found[topic][str(number)] = replicated if which else min(await log.start(topic, number), replicated)
        return found

    # In a task

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, EpochSlice):  # Spark asks with None where there is nothing to read
            return
        worker, slice_ = self._worker(), partition.slice
        facts = worker.run(_facts(worker, slice_.topic))
        _same_epoch(slice_.topic, partition.epoch, facts.epoch)
        page = EventPage(slice_.topic)
        start = slice_.start
        while start < slice_.stop:
            start, events = worker.run(_events(worker, slice_, facts, start))
            taken = [(id, row) for id, row in events if _takes(self._wanted, id, row)]
            page.add([id for id, _ in taken], slice_.partition, [row for _, row in taken])
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
    if page.next_offset <= start:
        raise _ends_before(slice_.topic, slice_.partition, slice_.stop, page.next_offset)
    numbered = await number_events(store, slice_.topic, slice_.partition, page.records, facts)
    return page.next_offset, numbered


async def _facts(worker: Worker, topic: str) -> TopicFacts:
    facts = await (await worker.store()).facts(topic)
    if facts is None:
        raise NotFound(f"topic {topic}: the store has nothing of it")
    return facts


async def _of_now(worker: Worker, given: Offsets) -> Offsets:
    """Offsets that somebody wrote down: where they name no epoch, the present one is meant."""
    epochs = {topic: (await _facts(worker, topic)).epoch for topic in given}
    return {topic: in_epoch(numbers_of(of), of.get(EPOCH, epochs[topic])) for topic, of in given.items()}


async def _check(worker: Worker, starts: Offsets) -> None:
    """A stream that retention has overtaken, or whose log is another one now, says so instead of going on."""
    log = await worker.log()
    for topic, numbers in starts.items():
        facts, state = await _facts(worker, topic), await log.topic(topic)
        _same_epoch(topic, epoch_of(numbers), facts.epoch)
        if state is None or state.topic_id != facts.topic_id:
            raise Corrupt(f"topic {topic}: the log does not hold the life of it that the store was filled from")
        for number, start in numbers_of(numbers).items():
            first = await log.start(topic, int(number))
            if first > start:
                raise LogLost(
                    topic=topic, partition=int(number), first=start, last=first - 1,
                    remedy="read them from the store without a stream, and begin a stream anew behind them",
                )  # fmt: skip
            end = await log.end(topic, int(number))
            if end < start:
                raise _ends_before(topic, int(number), start, end)


def _same_epoch(topic: str, read: int, now: int) -> None:
    if read != now:
        raise Corrupt(
            f"topic {topic}: the stream stands in epoch {read}, and the topic is in epoch {now}: it was adopted since. "
            "Read what the stream lacks from the store without a stream, and begin one anew, with a new checkpoint"
        )


def _ends_before(topic: str, partition: int, wanted: int, end: int) -> Corrupt:
    return Corrupt(
        f"topic {topic}, partition {partition}: the log ends at {end}, and the stream stands at {wanted}: restore the "
        f"log, or run 'tidebook journal adopt {topic}' and begin a stream anew"
    )
