"""Tail log partitions: replicate each new record as soon as the log has it, slice after slice, until `stop`."""

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
    PartitionReplicator,
)
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.futures import cancel_quietly

T = TypeVar("T")
Partition = tuple[str, int]
#: A partition's slices begin at least this long after one another, so that a busy one shares their cost among records.
SLICE_EVERY_S = 0.03
#: How often a partition without new records compares its position with the pointer, which others may have moved.
CHECK_EVERY_S = 30.0
_OFFSET_MAX = 2**62


class ReplicationTail:
    """Replicates some log partitions from their pointers on, concurrently, each in offset order.

    A partition that stops (see `PartitionReplicator`) does not affect the others. While the log or the store is
    unavailable, a partition retries for `wait_s`; then, and for a log that lost records, `run` raises the error after
    the slices in progress have ended. Two tails of one partition are harmless: the slower one's slices are skipped.
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
        #: Set when the first unreplicated offset of every partition is known; the partitions are then served.
        self.ready = asyncio.Event()
        self._positioned = 0
        self.replicators = {
            partition: PartitionReplicator(parts, *partition, config, clear_tags=clear_tags, wait_s=wait_s)
            for partition, config in configs.items()
        }

    def stop(self) -> None:
        """End `run` after the slices in progress; call it on the event loop."""
        self._stop.set()

    async def run(self, stops: Mapping[Partition, int] | None = None) -> None:
        """Replicate until `stop`; with `stops`, return once the records before these offsets are replicated."""
        tails = [
            asyncio.ensure_future(self._tail(each, _OFFSET_MAX if stops is None else stops[partition]))
            for partition, each in self.replicators.items()
        ]
        try:
            await asyncio.gather(*tails)
        finally:
            self.stop()  # the other partitions finish their slices, so that the work is not repeated
            await asyncio.gather(*tails, return_exceptions=True)

    async def _tail(self, replicator: PartitionReplicator, stop: int) -> None:
        endless = stop == _OFFSET_MAX
        offset = await self._retry(replicator.next_offset)
        self._positioned += 1
        if self._positioned == len(self.replicators):
            self.ready.set()
        while offset < stop and replicator.stopped is None and not self._stop.is_set():
            if endless and not await self._retry(partial(self._wait, replicator, offset)):
                offset = max(offset, await self._retry(replicator.next_offset))
                continue
            began_s = asyncio.get_running_loop().time()
            page = await self._retry(partial(self._read, replicator, offset, stop))
            if page.next_offset > offset:
                await replicator.replicate_range(page.records, offset, page.next_offset)
                offset = page.next_offset
            if endless:
                await self._pause(began_s + self._slice_every_s - asyncio.get_running_loop().time())
        if replicator.stopped is not None and endless:
            await self._stop.wait()

    async def _read(self, replicator: PartitionReplicator, start: int, stop: int) -> RecordPage:
        log = await self._parts.log()
        read = log.read if stop == _OFFSET_MAX else partial(read_page, log)
        return await read(replicator.topic, replicator.partition, start=start, stop=stop, limit=PAGE_RECORDS)

    async def _wait(self, replicator: PartitionReplicator, offset: int) -> bool:
        """Wait until the log has a record at `offset` or after it; return False after `stop`, or after a while."""
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
        """Retry a call for `wait_s` while the log or the store is unavailable, unless it was stopped."""
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
