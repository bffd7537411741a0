"""The Spark task that replicates records of log partitions, given as Arrow batches, to the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import msgspec
import pyarrow as pa

from tidebook.core.errors import Corrupt, Fenced, LogLost, OutcomeUnknown, Unavailable, UnknownVersion
from tidebook.core.replication_plan import Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.pipeline.records import SLICE_RECORDS_MAX, SLICE_VALUE_BYTES_MAX, merge_slices, value_bytes
from tidebook.pipeline.tick_thread import clears_tags
from tidebook.pipeline.worker import OpenStore, SparkWorker, open_settings_store
from tidebook.replication.slice import first_unreplicated_offset, plan_slice
from tidebook.runtime.backoff import Backoff
from tidebook.store.port import StoreWriter

LOGGER = logging.getLogger("tidebook.pipeline")
REASON_CHARS_MAX = 500
#: How often a slice is planned again after another replicator has moved the pointer.
FENCED_MAX = 50
FENCED_WAIT_S = 0.02
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
#: The page size for records that are read from the log because Spark did not deliver them.
PAGE_RECORDS = 5_000
#: Limits over all partitions of a task: two full slices, so that one is planned while another is written.
RECORDS_IN_FLIGHT_MAX = 2 * SLICE_RECORDS_MAX
VALUE_BYTES_IN_FLIGHT_MAX = 2 * SLICE_VALUE_BYTES_MAX


#: Errors that fail the whole query, which restarts from the pointers; any other error stops one partition.
QUERY_FAILURES = (Unavailable, OutcomeUnknown, Fenced, LogLost)


def unexpected_failure(error: Exception, start: int, stop: int) -> str:
    """Return the reason why a partition is stopped by an unexpected error in a range of offsets."""
    return f"replicating offsets {start} to {stop - 1} failed: {type(error).__name__}: {str(error)[:REASON_CHARS_MAX]}"


def log_too_short(topic: str, partition: int, wanted: int, end: int) -> Corrupt:
    """Return the error for a log that ends before an offset that was read earlier, so it was replaced."""
    return Corrupt(
        f"{topic}/{partition}: the log ends at {end}, and offsets up to {wanted - 1} were read from it before: "
        f"restore the log, or run 'tidebook journal adopt {topic}'"
    )


class TaskResult(msgspec.Struct, frozen=True):
    """The result of one partition in one task."""

    topic: str
    partition: int
    #: How many records it received, and how many of them it parked.
    records: int
    parked: int
    #: The pointer's offset and time; None if nothing is replicated.
    offset: int | None
    time_ms: int | None
    seconds: float
    #: Why the partition is stopped, if it is.
    stopped: str | None


TASK_RESULT_SCHEMA = (
    "topic string, partition int, records long, parked long, offset long, time_ms long, seconds double, stopped string"
)
_TASK_RESULT_ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("records", pa.int64()),
        ("parked", pa.int64()),
        ("offset", pa.int64()),
        ("time_ms", pa.int64()),
        ("seconds", pa.float64()),
        ("stopped", pa.string()),
    ]
)

Batches = Iterable[pa.RecordBatch]


def replicate_task(
    settings: str, configs: dict[str, TopicConfig], *, wait_s: float, opening: OpenStore = open_settings_store
) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow` that replicates its records in order and yields one row per partition."""
    encoded = msgspec.json.encode(configs)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        decoded = msgspec.json.decode(encoded, type=dict[str, TopicConfig])
        partitions = ConcurrentPartitions(SparkWorker.of(settings, opening), decoded, wait_s=wait_s)
        for topic, partition, records in merge_slices(batches):
            partitions.begin(topic, partition, records)
        rows = [msgspec.to_builtins(done) for done in partitions.finish()]
        yield pa.RecordBatch.from_pylist(rows, schema=_TASK_RESULT_ARROW)

    return run


class _Running(NamedTuple):
    future: Future[None]
    records: int
    size_bytes: int


class ConcurrentPartitions:
    """Replicates the log partitions of one task concurrently, each partition in offset order."""

    def __init__(self, worker: SparkWorker, configs: dict[str, TopicConfig], *, wait_s: float) -> None:
        self._worker = worker
        self._configs = configs
        self._wait_s = wait_s
        self._tasks: dict[tuple[str, int], PartitionTask] = {}
        #: Slices in flight, the oldest first.
        self._running: dict[tuple[str, int], _Running] = {}

    def begin(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        """Start a partition's next records; block until its previous ones are done and the limits allow it."""
        at = (topic, partition)
        if at not in self._tasks:
            self._tasks[at] = PartitionTask(self._worker, topic, partition, self._configs[topic], wait_s=self._wait_s)
        if at in self._running:
            self._wait_for(at)
        size_bytes = value_bytes(records)
        while self._running and not self._has_room(len(records), size_bytes):
            self._wait_for(next(iter(self._running)))
        future = self._worker.submit(self._tasks[at].replicate(records))
        self._running[at] = _Running(future, len(records), size_bytes)

    def _has_room(self, records: int, size_bytes: int) -> bool:
        running = self._running.values()
        return (
            sum(each.records for each in running) + records <= RECORDS_IN_FLIGHT_MAX
            and sum(each.size_bytes for each in running) + size_bytes <= VALUE_BYTES_IN_FLIGHT_MAX
        )

    def finish(self) -> list[TaskResult]:
        """Wait for all slices in flight; return the result of each partition."""
        while self._running:
            self._wait_for(next(iter(self._running)))
        return [task.done() for task in self._tasks.values()]

    def _wait_for(self, at: tuple[str, int]) -> None:
        running = self._running.pop(at)
        try:
            running.future.result()
        except BaseException:
            # Let the other slices finish, so that their work is not repeated.
            wait([each.future for each in self._running.values()])
            raise


class PartitionTask:
    """Replicates one log partition within one task."""

    def __init__(self, worker: SparkWorker, topic: str, partition: int, config: TopicConfig, *, wait_s: float) -> None:
        self._worker = worker
        self._topic = topic
        self._partition = partition
        self._config = config
        self._wait_s = wait_s
        self._clear_tags = clears_tags(worker.settings)
        self._records = self._parked = 0
        self._next: int | None = None
        self._pointer: Pointer | None = None
        self._stopped: str | None = None
        self._began = time.monotonic()

    def done(self) -> TaskResult:
        """Return the result so far."""
        at = self._pointer
        return TaskResult(
            topic=self._topic,
            partition=self._partition,
            records=self._records,
            parked=self._parked,
            offset=None if at is None else at.position.offset,
            time_ms=None if at is None else at.time_ms,
            seconds=time.monotonic() - self._began,
            stopped=self._stopped,
        )

    async def replicate(self, records: Sequence[Record]) -> None:
        """Replicate the next records, unless this partition is stopped.

        A record of an unknown version, or an unexpected error, stops this partition only; the next micro-batch retries
        it from its pointer. Errors in `QUERY_FAILURES` are raised and fail the query.
        """
        self._records += len(records)
        if self._stopped is not None:
            return
        # Spark reads a task's offsets in one pass, so a gap between two batches is a hole in the log.
        start = records[0].offset if self._next is None else self._next
        first = self._next is None
        self._next = records[-1].offset + 1
        try:
            await self._retry(start, self._next, records, check=first)
        except QUERY_FAILURES:
            raise
        except UnknownVersion as error:
            self._stopped = "; ".join([str(error), *getattr(error, "__notes__", ())])
        except Exception as error:
            self._stopped = unexpected_failure(error, start, self._next)
            LOGGER.exception("%s/%d is stopped: %s", self._topic, self._partition, self._stopped)
        if self._stopped is not None:
            self._pointer = await (await self._worker.store()).pointer(self._topic, self._partition)

    async def _retry(self, start: int, stop: int, records: Sequence[Record], *, check: bool) -> None:
        """Replicate a slice; retry while the store or log is unavailable, and after another replicator's write."""
        deadline = time.monotonic() + self._wait_s
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        fenced, fetch = 0, False
        while True:
            try:
                store = await self._worker.store()
                if fetch:
                    await self._fetch_before(store, start)
                self._pointer = await self._slice(store, records, start, stop)
                return
            except LogLost:
                if fetch or not check:
                    raise
                fetch = True  # the slice begins after the first unreplicated offset
            except Fenced:
                fenced += 1
                if fenced > FENCED_MAX:
                    raise
                await asyncio.sleep(FENCED_WAIT_S)
            except (Unavailable, OutcomeUnknown):
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > deadline:
                    raise
                await asyncio.sleep(pause_s)

    async def _fetch_before(self, store: StoreWriter, start: int) -> None:
        """Replicate the records between the pointer and `start`, reading them from the log.

        Such a gap is a hole in the log, or records that an old checkpoint skipped. Raise `LogLost` if the log no
        longer has them.
        """
        pointer = await store.pointer(self._topic, self._partition)
        wanted = first_unreplicated_offset(pointer, self._topic, self._partition, self._config)
        if wanted >= start:
            return
        log = await self._worker.log()
        while wanted < start:
            page = await log.read(self._topic, self._partition, start=wanted, stop=start, limit=PAGE_RECORDS)
            if page.next_offset <= wanted:
                raise log_too_short(self._topic, self._partition, start, page.next_offset)
            self._pointer = await self._slice(store, page.records, wanted, page.next_offset)
            wanted = page.next_offset

    async def _slice(self, store: StoreWriter, records: Sequence[Record], start: int, stop: int) -> Pointer | None:
        plan = await plan_slice(
            store, self._topic, self._partition, records, self._config,
            start=start, stop=stop, clear_tags=self._clear_tags,
        )  # fmt: skip
        if plan.writes is not None:
            await store.apply(plan.writes)
            self._parked += len(plan.writes.parked)
        if plan.stopped_by is not None:
            raise plan.stopped_by
        return plan.pointer
