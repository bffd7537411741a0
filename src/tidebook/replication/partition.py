"""Replicate one log partition to the store, slice after slice: the one loop that every engine uses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, Unavailable, UnknownVersion
from tidebook.core.replication_plan import Pointer, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Log, Record, read_page
from tidebook.replication.slice import plan_slice
from tidebook.runtime import tracing
from tidebook.runtime.backoff import Backoff
from tidebook.store.port import StoreWriter

LOGGER = logging.getLogger("tidebook.replication")

#: A topic and the number of one of its partitions.
Partition = tuple[str, int]

REASON_CHARS_MAX = 500
#: The maximum number of attempts to apply a slice while other replicators move the pointer.
FENCED_MAX = 50
FENCED_WAIT_S = 0.02
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
#: The page size for records that are read from the log.
PAGE_RECORDS = 5_000
#: Errors that end a whole run, which starts again from the pointers; any other error stops one partition.
RUN_FAILURES = (Unavailable, OutcomeUnknown, Fenced, LogLost)


class LogAndStore:
    """The log and the store that a replication uses. The subclass for Spark workers opens them on first use."""

    def __init__(self, log: Log, store: StoreWriter) -> None:
        self._log = log
        self._store = store

    async def log(self) -> Log:
        """Return the log."""
        return self._log

    async def store(self) -> StoreWriter:
        """Return the store."""
        return self._store


class PartitionReplicator:
    """Replicates one log partition: `replicate` takes records that were read, `catch_up` reads them from the log.

    A record of an unknown version, or an unexpected error, stops the partition, and a new replicator retries it from
    the pointer. Errors in `RUN_FAILURES` are raised.
    """

    def __init__(
        self,
        parts: LogAndStore,
        topic: str,
        partition: int,
        config: TopicConfig,
        *,
        clear_tags: bool = True,
        wait_s: float = 0.0,
    ) -> None:
        self.topic = topic
        self.partition = partition
        #: How many records it received or read, in how many slices of `catch_up`, and how many records it parked.
        self.records = self.slices = self.parked = 0
        #: The partition's pointer after the last slice.
        self.pointer: Pointer | None = None
        #: Whether another replicator has replicated records that this one was to replicate. Marks do not count, because
        #: a Spark driver replicates its ticks itself.
        self.overtaken = False
        #: Why the partition is stopped, if it is.
        self.stopped: str | None = None
        self._parts = parts
        self._config = config
        self._clear_tags = clear_tags
        self._wait_s = wait_s
        self._next: int | None = None

    async def replicate(self, records: Sequence[Record]) -> None:
        """Replicate the next records of a continuous read: a gap between the records of two calls is a hole in the log.

        Retry for `wait_s` while the log or the store is unavailable. Records between the pointer and the first call's
        records are read from the log.
        """
        start = records[0].offset if self._next is None else self._next
        await self.replicate_range(records, start, records[-1].offset + 1)

    async def replicate_range(self, records: Sequence[Record], start: int, stop: int) -> None:
        """Replicate the offsets from `start` to `stop` - 1 as `replicate` does; `records` are all the records there."""
        self.records += len(records)
        self._next = stop
        if self.stopped is None:
            with self._stopped_by_errors(start, stop):
                await self._apply_with_retries(records, start, stop)

    async def catch_up(self, stop: int) -> None:
        """Replicate the records before `stop` that the store lacks, reading them from the log."""
        if self.stopped is None:
            with self._stopped_by_errors(await self.next_offset(), stop):
                await self._read_and_apply(stop, count=True)

    async def next_offset(self) -> int:
        """Return the partition's first unreplicated offset."""
        pointer = await (await self._parts.store()).pointer(self.topic, self.partition)
        return first_unreplicated_offset(pointer, self.topic, self.partition, self._config)

    @contextmanager
    def _stopped_by_errors(self, start: int, stop: int) -> Iterator[None]:
        try:
            yield
        except RUN_FAILURES:
            raise
        except UnknownVersion as error:
            self.stopped = "; ".join([str(error), *getattr(error, "__notes__", ())])
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:REASON_CHARS_MAX]}"
            self.stopped = f"replicating offsets {start} to {stop - 1} failed: {reason}"
            LOGGER.exception("%s/%d is stopped: %s", self.topic, self.partition, self.stopped)

    async def _apply_with_retries(self, records: Sequence[Record], start: int, stop: int) -> None:
        deadline = time.monotonic() + self._wait_s
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        fenced, has_gap = 0, False
        while True:
            try:
                if has_gap:
                    await self._read_and_apply(start)
                await self._apply(records, start, stop)
                return
            except LogLost:
                if has_gap:
                    raise
                has_gap = True  # a hole in the log, or records that an old checkpoint skipped
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

    async def _read_and_apply(self, stop: int, *, count: bool = False) -> None:
        log = await self._parts.log()
        while (start := await self.next_offset()) < stop:
            page = await read_page(log, self.topic, self.partition, start=start, stop=stop, limit=PAGE_RECORDS)
            try:
                await self._apply(page.records, start, page.next_offset)
            except Fenced:
                if await self.next_offset() == start:
                    raise  # no replicator has moved the pointer: the topic was deleted or adopted
                continue  # another replicator has moved the pointer
            if count:
                self.slices, self.records = self.slices + 1, self.records + len(page.records)

    async def _apply(self, records: Sequence[Record], start: int, stop: int) -> None:
        store = await self._parts.store()
        with tracing.span("replicate.slice", topic=self.topic, partition=self.partition, records=len(records)):
            plan = await plan_slice(
                store, self.topic, self.partition, records, self._config,
                start=start, stop=stop, clear_tags=self._clear_tags,
            )  # fmt: skip
            if plan.writes is not None:
                await store.apply(plan.writes)
                self.parked += len(plan.writes.parked)
            elif start < stop and plan.stopped_by is None and any(record.key is not None for record in records):
                self.overtaken = True
        self.pointer = plan.pointer
        if plan.stopped_by is not None:
            raise plan.stopped_by
