"""Journals as a Spark stream: replicated events in log order, with a limit per trigger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tidebook.core.errors import Corrupt, InvalidInput, LogLost, NotFound
from tidebook.core.event import decode_event
from tidebook.core.replication_plan import EventRow
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.seq_nr_lookup import number_events
from tidebook.pipeline.source.epochs import EPOCH, epoch_of, in_epoch, partition_offsets, without_epochs
from tidebook.pipeline.source.events import EventPage
from tidebook.pipeline.source.lag import warn_of_lag
from tidebook.pipeline.source.options import STREAM, Options, one_line_errors
from tidebook.pipeline.source.records import RECORDS_MAX, Offsets, RecordsSlice, bound_offsets, slices_between
from tidebook.pipeline.source.selection import Selection
from tidebook.pipeline.worker import SparkWorker
from tidebook.replication.slice import first_unreplicated_offset
from tidebook.runtime.clock import SystemClock

PAGE_RECORDS = 5_000
EARLIEST, LATEST = "earliest", "latest"


class EpochSlice(InputPartition):
    """A range of one log partition, and the epoch in which it was planned."""

    def __init__(self, slice_: RecordsSlice, epoch: int) -> None:
        self.slice = slice_
        self.epoch = epoch


class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams the events of the topics in the option `topic`, starting at `startingOffsets`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        given = Options(options)
        given.check_names(STREAM)
        self._settings = given.settings()
        self._selection = given.selection()
        if not self._selection.topics:
            raise InvalidInput('readStream.format("tidebook") needs the option topic')
        self._from = given.text("startingOffsets") or EARLIEST
        self._given = {} if self._from in (EARLIEST, LATEST) else given.offsets("startingOffsets")
        self._rows = given.number("maxRecordsPerTrigger", RECORDS_MAX, least=1)
        self._target: Offsets | None = None

    # On the driver

    def initialOffset(self) -> dict[str, Any]:
        with one_line_errors():
            return self._initial()

    def _initial(self) -> Offsets:
        if self._from == EARLIEST:
            return self._worker().run(self._bounds(self._worker(), which=0))
        if self._from == LATEST:
            return self._worker().run(self._bounds(self._worker(), which=1))
        return self._worker().run(_in_current_epoch(self._worker(), self._selection, self._given))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._worker().run(self._bounds(self._worker(), which=1))
        self._worker().run(self._warn_of_lag(self._worker()))

    async def _warn_of_lag(self, worker: SparkWorker) -> None:
        """Warn of unreplicated records, which a stream with `availableNow` does not deliver."""
        store = await worker.store()
        for topic in sorted(self._selection.topics or ()):
            config, pointers = await _config_of(worker, topic), await store.pointers(topic)
            every = range(config.partitions)
            await warn_of_lag(worker, topic, config, pointers, partitions=every, stops={}, clock=SystemClock())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the replicated end within the limit; events have sequence numbers only once they are replicated."""
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
        stops = bound_offsets(without_epochs(start), without_epochs(ends), rows)
        return {topic: in_epoch(numbers, epoch_of(ends[topic])) for topic, numbers in stops.items()}

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._worker().run(self._bounds(self._worker(), which=1))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        slices = slices_between(without_epochs(start), without_epochs(end))
        return [EpochSlice(each, epoch_of(start[each.topic])) for each in slices]

    def _worker(self) -> SparkWorker:
        return SparkWorker.of(self._settings)

    async def _bounds(self, worker: SparkWorker, *, which: int) -> Offsets:
        """Return the log's first offsets (`which` 0), or the first unreplicated ones (`which` 1)."""
        log, store = await worker.log(), await worker.store()
        found: Offsets = {}
        for topic in sorted(self._selection.topics or ()):
            config = await _config_of(worker, topic)
            found[topic] = {EPOCH: config.epoch}
            for number in range(config.partitions):
                pointer = await store.pointer(topic, number)
                replicated = first_unreplicated_offset(pointer, topic, number, config)
                found[topic][str(number)] = replicated if which else min(await log.start(topic, number), replicated)
        return found

    # In a task

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, EpochSlice):  # Spark passes None if there are no partitions
            return
        worker, slice_ = self._worker(), partition.slice
        config = worker.run(_config_of(worker, slice_.topic))
        _same_epoch(slice_.topic, partition.epoch, config.epoch)
        page = EventPage(slice_.topic)
        start = slice_.start
        while start < slice_.stop:
            start, events = worker.run(_events(worker, slice_, config, start))
            taken = [(id, row) for id, row in events if _selects(self._selection, id, row)]
            page.add([id for id, _ in taken], slice_.partition, [row for _, row in taken])
            if page.full:
                yield from page.take()
        yield from page.take()


def _selects(selection: Selection, id: str, row: EventRow) -> bool:
    if not selection.takes(id, row.seq_nr, row.timestamp_ms):
        return False
    return selection.tag is None or selection.tag in decode_event(row.kept).tags


async def _events(
    worker: SparkWorker, slice_: RecordsSlice, config: TopicConfig, start: int
) -> tuple[int, list[tuple[str, EventRow]]]:
    log, store = await worker.log(), await worker.store()
    page = await log.read(slice_.topic, slice_.partition, start=start, stop=slice_.stop, limit=PAGE_RECORDS)
    if page.next_offset <= start:
        raise _log_too_short(slice_.topic, slice_.partition, slice_.stop, page.next_offset)
    numbered = await number_events(store, slice_.topic, slice_.partition, page.records, config)
    return page.next_offset, numbered


async def _config_of(worker: SparkWorker, topic: str) -> TopicConfig:
    config = await (await worker.store()).topic_config(topic)
    if config is None:
        raise NotFound(f"topic {topic}: the store has nothing of it")
    return config


async def _in_current_epoch(worker: SparkWorker, selection: Selection, given: Offsets) -> Offsets:
    """Return user-given offsets with an epoch, by default the current one.

    Raise `InvalidInput` if a partition of the topics is missing, because it would silently never be read.
    """
    if given.keys() != selection.topics:
        raise InvalidInput(
            f"startingOffsets names {sorted(given)}, and the option topic {sorted(selection.topics or ())}"
        )
    epochs = {}
    for topic in given:
        config = await _config_of(worker, topic)
        epochs[topic] = config.epoch
        if set(partition_offsets(given[topic])) != {str(number) for number in range(config.partitions)}:
            raise InvalidInput(
                f"startingOffsets of topic {topic}: name the partitions 0 to {config.partitions - 1}, each"
            )
    return {topic: in_epoch(partition_offsets(of), of.get(EPOCH, epochs[topic])) for topic, of in given.items()}


async def _check(worker: SparkWorker, starts: Offsets) -> None:
    """Raise `LogLost` if retention has passed the stream's offsets, `Corrupt` if the log was replaced."""
    log = await worker.log()
    for topic, numbers in starts.items():
        config, state = await _config_of(worker, topic), await log.topic(topic)
        _same_epoch(topic, epoch_of(numbers), config.epoch)
        if state is None or state.topic_id != config.topic_id:
            raise Corrupt(f"topic {topic}: the log holds another incarnation of it than the store was filled from")
        for number, start in partition_offsets(numbers).items():
            first = await log.start(topic, int(number))
            if first > start:
                raise LogLost(
                    topic=topic, partition=int(number), first=start, last=first - 1,
                    remedy="read them from the store in a batch query, and start a new stream after them",
                )  # fmt: skip
            end = await log.end(topic, int(number))
            if end < start:
                raise _log_too_short(topic, int(number), start, end)


def _same_epoch(topic: str, read: int, now: int) -> None:
    if read != now:
        raise Corrupt(
            f"topic {topic}: the stream is in epoch {read}, and the topic is in epoch {now}: it was adopted since. "
            "Read the missing events from the store in a batch query, and start a new stream with a new checkpoint"
        )


def _log_too_short(topic: str, partition: int, wanted: int, end: int) -> Corrupt:
    return Corrupt(
        f"topic {topic}, partition {partition}: the log ends at {end}, and the stream is at {wanted}: restore the "
        f"log, or run 'tidebook journal adopt {topic}' and start a new stream"
    )
