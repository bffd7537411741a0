"""Journals as a Spark stream: replicated events in log order, with a limit per trigger."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tidebook.core.errors import Corrupt, InvalidInput, LogLost, NotFound, TidebookError
from tidebook.core.event import decode_event
from tidebook.core.replication_plan import EventRow, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import read_page
from tidebook.pipeline.source.event_page import EventPage
from tidebook.pipeline.source.journals import warn_of_lag
from tidebook.pipeline.source.options import STREAM, Options, check_offsets, one_line_errors
from tidebook.pipeline.source.records import (
    RECORDS_MAX,
    TOPIC_ID,
    Offsets,
    RecordsSlice,
    bound_offsets,
    epoch_of,
    identity_of,
    partition_offsets,
    slices_between,
    topic_identity,
)
from tidebook.pipeline.worker import SparkWorker
from tidebook.replication.event_numbers import number_events

PAGE_RECORDS = 5_000
EARLIEST, LATEST = "earliest", "latest"
#: How long nothing may be replicated before a running stream checks for unreplicated records, and how often it warns.
STALL_S = 5.0
WARN_EVERY_S = 60.0


class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams the events of the topics in the option `topic`, starting at `startingOffsets`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        given = Options(options)
        if "freshness" in given:
            raise InvalidInput("the option freshness is for tables: a stream delivers events once they are replicated")
        given.check_names(STREAM)
        self._settings = given.settings()
        self._selection = given.selection()
        self._topics = sorted(self._selection.topics or ())
        if not self._topics:
            raise InvalidInput('readStream.format("tidebook") needs the option topic')
        self._from = given.text("startingOffsets") or EARLIEST
        self._given = {} if self._from in (EARLIEST, LATEST) else given.offsets("startingOffsets")
        self._rows = given.number("maxRecordsPerTrigger", RECORDS_MAX, least=1)
        self._form = given.payload_form()
        self._target: Offsets | None = None
        self._replicated: Offsets = {}
        self._check_at_s = 0.0

    @property
    def _worker(self) -> SparkWorker:
        return SparkWorker.of(self._settings)

    # On the driver

    def initialOffset(self) -> dict[str, Any]:
        with one_line_errors():
            if self._from in (EARLIEST, LATEST):
                return self._worker.run(self._bounds(replicated=self._from == LATEST))
            return self._worker.run(self._given_offsets())

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows)

    def prepareForTriggerAvailableNow(self) -> None:
        with one_line_errors():
            self._target = self._worker.run(self._bounds(replicated=True))
        self._worker.run(self._warn_of_lag())

    async def _warn_of_lag(self) -> bool:
        """Warn of unreplicated records, which the stream does not deliver; return whether there are any."""
        store, warned = await self._worker.store(), False
        for topic in self._topics:
            config, pointers = await _topic_config(self._worker, topic), await store.pointers(topic)
            partitions = range(config.partitions)
            warned |= await warn_of_lag(self._worker, topic, config, pointers, partitions=partitions, stops={})
        return warned

    def _warn_of_stall(self, replicated: Offsets) -> None:
        """Warn of unreplicated records while the end of the replicated ones does not move."""
        now_s = time.monotonic()
        if replicated != self._replicated:
            self._replicated, self._check_at_s = replicated, now_s + STALL_S
        elif now_s >= self._check_at_s:
            self._check_at_s = now_s + (WARN_EVERY_S if self._worker.run(self._warn_of_lag()) else STALL_S)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the replicated end within the limit; events have sequence numbers only once they are replicated."""
        with one_line_errors():
            self._worker.run(self._check(start))
        found = self._target or self._worker.run(self._bounds(replicated=True))
        if self._target is None:
            self._warn_of_stall(found)
        ends: Offsets = {}
        for topic, numbers in start.items():
            now = found.get(topic, numbers)
            _check_identity(topic, numbers, now)
            reached = {number: max(at, now.get(number, at)) for number, at in partition_offsets(numbers).items()}
            ends[topic] = identity_of(now) | reached
        if isinstance(limit, ReadAllAvailable):
            return ends
        return bound_offsets(start, ends, limit.max_rows if isinstance(limit, ReadMaxRows) else self._rows)

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._worker.run(self._bounds(replicated=True))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return slices_between(start, end)

    async def _bounds(self, *, replicated: bool) -> Offsets:
        """Return the first unreplicated offsets, or the log's first ones."""
        log, store = await self._worker.log(), await self._worker.store()
        found: Offsets = {}
        for topic in self._topics:
            config = await _topic_config(self._worker, topic)
            found[topic] = topic_identity(config)
            for number in range(config.partitions):
                offset = first_unreplicated_offset(await store.pointer(topic, number), topic, number, config)
                found[topic][str(number)] = offset if replicated else min(await log.start(topic, number), offset)
        return found

    async def _given_offsets(self) -> Offsets:
        """Return user-given offsets with an epoch, by default the current one.

        Raise `InvalidInput` if a partition of the topics is missing, because it would silently never be read.
        """
        given = self._given
        if sorted(given) != self._topics:
            raise InvalidInput(
                f"startingOffsets must name the topics of the option topic, {self._topics}, not {sorted(given)}"
            )
        found: Offsets = {}
        for topic in given:
            config = await _topic_config(self._worker, topic)
            if set(partition_offsets(given[topic])) != {str(number) for number in range(config.partitions)}:
                raise InvalidInput(
                    f"startingOffsets of topic {topic} must name all partitions from 0 to {config.partitions - 1}"
                )
            check_offsets("startingOffsets", {topic: given[topic]}, {topic: config})
            found[topic] = topic_identity(config) | given[topic]
        return found

    async def _check(self, starts: Offsets) -> None:
        """Raise `LogLost` if the log does not hold the stream's offsets, `Corrupt` if it was replaced."""
        log = await self._worker.log()
        for topic, numbers in starts.items():
            config = await _topic_config(self._worker, topic)
            _check_identity(topic, numbers, topic_identity(config))
            await _check_log(self._worker, topic, config)
            for number, start in partition_offsets(numbers).items():
                first = await log.start(topic, int(number))
                if first > start:
                    raise LogLost(
                        topic=topic, partition=int(number), first=start, last=first - 1,
                        remedy="read them from the store in a batch query, and start a new stream after them",
                    )  # fmt: skip
                if (end := await log.end(topic, int(number))) < start:  # the log became shorter
                    await read_page(log, topic, int(number), start=end, stop=start, limit=1)

    # In a task

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RecordsSlice):  # Spark passes None if there are no partitions
            return
        worker, topic = self._worker, partition.topic
        config = worker.run(_topic_config(worker, topic))
        _check_identity(topic, partition.identity, topic_identity(config))
        page = EventPage(topic, self._form)
        start = partition.start
        while start < partition.stop:
            start, events = worker.run(_events(worker, partition, config, start))
            taken = [(id, row) for id, row in events if self._selects(id, row)]
            page.add([id for id, _ in taken], partition.partition, [row for _, row in taken])
            if page.full:
                yield from page.take()
        worker.run(_check_log(worker, topic, config))
        yield from page.take()

    def _selects(self, id: str, row: EventRow) -> bool:
        selection = self._selection
        if not selection.takes(id, row.seq_nr, row.timestamp_ms):
            return False
        return selection.tag is None or selection.tag in decode_event(row.encoded).tags


class RefusedStream(JournalStream):
    """A stream with wrong options: its first call raises the error, because Spark hides those of `streamReader`."""

    def __init__(self, error: TidebookError) -> None:
        self._error = error

    def getDefaultReadLimit(self) -> NoReturn:
        with one_line_errors():
            raise self._error

    initialOffset = prepareForTriggerAvailableNow = getDefaultReadLimit


async def _topic_config(worker: SparkWorker, topic: str) -> TopicConfig:
    config = await (await worker.store()).topic_config(topic)
    if config is None:
        raise NotFound(f"topic {topic} is not in the store")
    return config


def _check_identity(topic: str, read: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raise `Corrupt` if the offsets of a stream are not of the topic's current epoch and incarnation."""
    if epoch_of(read) != epoch_of(now):
        raise Corrupt(
            f"topic {topic}: the stream is in epoch {epoch_of(read)}, and the topic is in epoch {epoch_of(now)}: it "
            "was adopted since. Read the missing events from the store in a batch query, and start a new stream with "
            "a new checkpoint"
        )
    # Checkpoints of an earlier version have no id.
    if read.get(TOPIC_ID) not in (None, now.get(TOPIC_ID)):
        raise Corrupt(
            f"topic {topic}: it was deleted and created again since the stream has read it: start a new stream with a "
            "new checkpoint"
        )


async def _check_log(worker: SparkWorker, topic: str, config: TopicConfig) -> None:
    """Raise `Corrupt` if the log's topic is not the configured one."""
    state = await (await worker.log()).topic(topic)
    if state is None or state.topic_id != config.topic_id:
        raise Corrupt(f"topic {topic}: the log holds another incarnation of it than the store was filled from")


async def _events(
    worker: SparkWorker, slice_: RecordsSlice, config: TopicConfig, start: int
) -> tuple[int, list[tuple[str, EventRow]]]:
    topic, partition = slice_.topic, slice_.partition
    page = await read_page(await worker.log(), topic, partition, start=start, stop=slice_.stop, limit=PAGE_RECORDS)
    return page.next_offset, await number_events(await worker.store(), topic, partition, page.records, config)
