"""A task of the replication: the slice of one log partition, as Arrow batches, in a Python worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import msgspec
import pyarrow as pa

from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, Unavailable, UnknownVersion
from tidebook.core.replication import Pointer
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Record
from tidebook.pipeline.records import SLICE_RECORDS_MAX, SLICE_VALUE_BYTES_MAX, slices_of, value_bytes
from tidebook.pipeline.slice import next_offset, plan_slice
from tidebook.pipeline.ticking import clears_tags
from tidebook.pipeline.worker import OpenStore, Worker, open_settings_store
from tidebook.store.port import StoreWriter

#: How often a slice is planned again because another replicator was faster.
FENCED_MAX = 50
FENCED_WAIT_S = 0.02
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
#: Records that Spark did not bring are read from the log in pages of this size.
PAGE_RECORDS = 5_000
#: Of all partitions of a task together: twice what a slice may hold, so that one is planned while another is written.
RECORDS_AT_ONCE_MAX = 2 * SLICE_RECORDS_MAX
VALUE_BYTES_AT_ONCE_MAX = 2 * SLICE_VALUE_BYTES_MAX


class Done(msgspec.Struct, frozen=True):
    """What a task came to."""

    topic: str
    partition: int
    #: How many records it was given, and how many of them are kept aside now.
    records: int
    parked: int
    #: How far the partition is replicated now; None: not at all.
    offset: int | None
    time_ms: int | None
    seconds: float
    #: Why the partition stops here, if it does.
    stopped: str | None


DONE = (
    "topic string, partition int, records long, parked long, offset long, time_ms long, seconds double, stopped string"
)
_DONE_ARROW = pa.schema(
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
    settings: str, facts: dict[str, TopicFacts], *, wait_s: float, opening: OpenStore = open_settings_store
) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """A function for `mapInArrow`: replicates what it is given, in order, and yields one row a partition."""
    kept = msgspec.json.encode(facts)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        known = msgspec.json.decode(kept, type=dict[str, TopicFacts])
        at_once = PartitionsAtOnce(Worker.of(settings, opening), known, wait_s=wait_s)
        for topic, partition, records in slices_of(batches):
            at_once.begin(topic, partition, records)
        rows = [msgspec.to_builtins(done) for done in at_once.finish()]
        yield pa.RecordBatch.from_pylist(rows, schema=_DONE_ARROW)

    return run


class _Running(NamedTuple):
    future: Future[None]
    records: int
    size_bytes: int


class PartitionsAtOnce:
    """The log partitions of one task: each in its own order, and beside each other."""

    def __init__(self, worker: Worker, facts: dict[str, TopicFacts], *, wait_s: float) -> None:
        self._worker = worker
        self._facts = facts
        self._wait_s = wait_s
        self._tasks: dict[tuple[str, int], PartitionTask] = {}
        #: What is on its way, the oldest first.
        self._running: dict[tuple[str, int], _Running] = {}

    def begin(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        """Begin with a partition's next records, as soon as those before them are done and there is room."""
        at = (topic, partition)
        if at not in self._tasks:
            self._tasks[at] = PartitionTask(self._worker, topic, partition, self._facts[topic], wait_s=self._wait_s)
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
            sum(each.records for each in running) + records <= RECORDS_AT_ONCE_MAX
            and sum(each.size_bytes for each in running) + size_bytes <= VALUE_BYTES_AT_ONCE_MAX
        )

    def finish(self) -> list[Done]:
        """Wait for all of them; returns what each came to."""
        while self._running:
            self._wait_for(next(iter(self._running)))
        return [task.done() for task in self._tasks.values()]

    def _wait_for(self, at: tuple[str, int]) -> None:
        running = self._running.pop(at)
        try:
            running.future.result()
        except BaseException:
            # The others may finish what they have begun: it need not be done again.
            wait([each.future for each in self._running.values()])
            raise


class PartitionTask:
    """One log partition within one task."""

    def __init__(self, worker: Worker, topic: str, partition: int, facts: TopicFacts, *, wait_s: float) -> None:
        self._worker = worker
        self._topic = topic
        self._partition = partition
        self._facts = facts
        self._wait_s = wait_s
        self._clear_tags = clears_tags(worker.settings)
        self._records = self._parked = 0
        self._next: int | None = None
        self._pointer: Pointer | None = None
        self._stopped: str | None = None
        self._began = time.monotonic()

    def done(self) -> Done:
        """What it came to."""
        at = self._pointer
        return Done(
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
        """Replicate the next records; behind one of an unknown version nothing of this partition is."""
        self._records += len(records)
        if self._stopped is not None:
            return
        # Within a task one batch follows the other, so a gap between them is a hole in the log.
        start = records[0].offset if self._next is None else self._next
        first = self._next is None
        self._next = records[-1].offset + 1
        try:
            await self._persevere(start, self._next, records, check=first)
        except UnknownVersion as error:
            self._stopped = "; ".join([str(error), *getattr(error, "__notes__", ())])
            self._pointer = await (await self._worker.store()).pointer(self._topic, self._partition)

    async def _persevere(self, start: int, stop: int, records: Sequence[Record], *, check: bool) -> None:
        """Try until it is done: a store that is away comes back, and another replicator may have been faster."""
        deadline = time.monotonic() + self._wait_s
        wait_s, fenced, fetch = RETRY_FIRST_S, 0, False
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
                fetch = True  # the slice begins behind the next record that the store waits for
            except Fenced:
                fenced += 1
                if fenced > FENCED_MAX:
                    raise
                await asyncio.sleep(FENCED_WAIT_S)
            except (Unavailable, OutcomeUnknown):
                if time.monotonic() + wait_s > deadline:
                    raise
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, RETRY_MAX_S)

    async def _fetch_before(self, store: StoreWriter, start: int) -> None:
        """Replicate what lies between the pointer and what Spark brought: holes mostly, or what a checkpoint left out.

        Where the log no longer has it, it is lost, and this says so.
        """
        pointer = await store.pointer(self._topic, self._partition)
        wanted = next_offset(pointer, self._topic, self._partition, self._facts)
        if wanted >= start:
            return
        log = await self._worker.log()
        while wanted < start:
            page = await log.read(self._topic, self._partition, start=wanted, stop=start, limit=PAGE_RECORDS)
            self._pointer = await self._slice(store, page.records, wanted, page.next_offset)
            wanted = page.next_offset

    async def _slice(self, store: StoreWriter, records: Sequence[Record], start: int, stop: int) -> Pointer | None:
        plan = await plan_slice(
            store, self._topic, self._partition, records, self._facts,
            start=start, stop=stop, clear_tags=self._clear_tags,
        )  # fmt: skip
        if plan.writes is not None:
            await store.apply(plan.writes)
            self._parked += len(plan.writes.parked)
        if plan.stopped_by is not None:
            raise plan.stopped_by
        return plan.pointer
