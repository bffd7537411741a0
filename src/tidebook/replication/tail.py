"""Tail log partitions: replicate new records in slices as soon as the log has them, until `stop` is called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import RecordPage, read_page
from tidebook.replication.partition import (
    PAGE_RECORDS,
    RETRY_FIRST_S,
    RETRY_MAX_S,
    LogAndStore,
    Partition,
    PartitionReplicator,
)
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.futures import cancel_quietly

T = TypeVar("T")
#: The shortest time from the start of one slice of a partition to the next: on a busy partition, each slice then holds
#: several records and their writes are batched.
SLICE_EVERY_S = 0.03
#: How often a partition without new records compares its position with the pointer, which another process may have
#: advanced.
CHECK_EVERY_S = 30.0
_OFFSET_MAX = 2**62


class ReplicationTail:
    """Replicates some log partitions concurrently, each in offset order from its pointer onward.

    A partition that stops (see `PartitionReplicator`) does not affect the others. While the log or the store is
    unavailable, a partition retries for `wait_s`. If it still is, or if the log has lost records, `run` lets the slices
    in progress finish and raises the error. Two tails of one partition are harmless: the slower one's slices are
    skipped.
    """

    def __init__(
        self,
        parts: LogAndStore,
        configs: Mapping[Partition, TopicConfig],
        *,
        clear_tags: bool = True,
        wait_s: float = 0.0,
        slice_every_s: float = SLICE_EVERY_S,
    ) -> None:
        self._parts = parts
        self._wait_s = wait_s
        self._slice_every_s = slice_every_s
        self._stop = asyncio.Event()
        #: Set when the first unreplicated offset of every partition is known: from then on new records are replicated.
        self.ready = asyncio.Event()
        self._positioned = 0
        self.replicators = {
            partition: PartitionReplicator(parts, *partition, config, clear_tags=clear_tags, wait_s=wait_s)
            for partition, config in configs.items()
        }

    def stop(self) -> None:
        """End `run` after the slices in progress; call it on the event loop."""
        self._stop.set()

    async def run(self, end_offsets: Mapping[Partition, int] | None = None) -> None:
        """Replicate until `stop` is called; with `end_offsets`, return once all records before them are replicated."""
        tails = [
            asyncio.ensure_future(self._tail(each, _OFFSET_MAX if end_offsets is None else end_offsets[partition]))
            for partition, each in self.replicators.items()
        ]
        try:
            await asyncio.gather(*tails)
        finally:
            self.stop()  # the other partitions finish their slices, so that the work is not repeated
            await asyncio.gather(*tails, return_exceptions=True)

    async def _tail(self, replicator: PartitionReplicator, end_offset: int) -> None:
        endless = end_offset == _OFFSET_MAX
        offset = await self._retry(replicator.next_offset)
        self._positioned += 1
        if self._positioned == len(self.replicators):
            self.ready.set()
        while offset < end_offset and replicator.stopped is None and not self._stop.is_set():
            if endless and not await self._retry(partial(self._wait, replicator, offset)):
                offset = max(offset, await self._retry(replicator.next_offset))
                continue
            began_s = asyncio.get_running_loop().time()
            page = await self._retry(partial(self._read, replicator, offset, end_offset))
            if page.next_offset > offset:
                await replicator.replicate_range(page.records, offset, page.next_offset)
                offset = page.next_offset
            if endless:
                await self._pause(began_s + self._slice_every_s - asyncio.get_running_loop().time())
        if replicator.stopped is not None and endless:
            await self._stop.wait()

    async def _read(self, replicator: PartitionReplicator, start: int, end_offset: int) -> RecordPage:
        log = await self._parts.log()
        read = log.read if end_offset == _OFFSET_MAX else partial(read_page, log)
        return await read(replicator.topic, replicator.partition, start=start, stop=end_offset, limit=PAGE_RECORDS)

    async def _wait(self, replicator: PartitionReplicator, offset: int) -> bool:
        """Wait for a record at or after `offset`; return False if `stop` was called or after `CHECK_EVERY_S`."""
        log = await self._parts.log()
        topic, partition = replicator.topic, replicator.partition
        new_record = asyncio.ensure_future(log.wait(topic, partition, offset=offset, timeout_s=CHECK_EVERY_S))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((new_record, stopping), return_when=asyncio.FIRST_COMPLETED)
            return new_record.done() and new_record.result()
        finally:
            cancel_quietly(new_record)
            stopping.cancel()

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry a call for `wait_s` while the log or the store is unavailable, unless the tail was stopped."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        deadline_s = asyncio.get_running_loop().time() + self._wait_s
        while True:
            try:
                return await call()
            except (Unavailable, OutcomeUnknown):
                pause_s = backoff.next_s()
                if self._stop.is_set() or asyncio.get_running_loop().time() + pause_s > deadline_s:
                    raise
            await self._pause(pause_s)

    async def _pause(self, pause_s: float) -> None:
        if pause_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
