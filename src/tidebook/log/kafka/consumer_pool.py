"""A bounded pool of consumers; a read that continues gets the consumer that is already at its offset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tidebook.core.errors import NotFound, Unavailable
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.slice_reader import LogSlice, SliceReader
from tidebook.log.port import RecordPage
from tidebook.runtime.metrics import Metrics

#: An idle consumer stops fetching after this time.
_PAUSE_AFTER_S = 1.0


class _PooledConsumer:
    """A consumer, its thread, and since when it is idle."""

    __slots__ = ("idle_since", "paused", "reader", "thread")

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "tidebook-kafka-consumer")
        self.reader: SliceReader | None = None
        self.idle_since = 0.0
        self.paused = True

    def fitness(self, wanted: LogSlice) -> int:
        """Rate how well the consumer is positioned for a read; 3 is exactly at its start, 0 in another partition."""
        if self.reader is None or self.reader.assigned != (wanted.topic, wanted.partition):
            return 1 if self.reader is None or self.reader.assigned is None else 0
        return 3 if self.reader.next_offset == wanted.start else 2


class ConsumerPool:
    """Opens consumers for reads on demand, and closes those that are idle."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._idle: list[_PooledConsumer] = []
        self._count = 0
        self._free = asyncio.Semaphore(settings.consumers_max)
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._closed = False

    async def read(self, wanted: LogSlice) -> RecordPage:
        """Read the next page of a slice with the best positioned idle consumer; raise Unavailable if all stay busy."""
        try:
            async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                await self._free.acquire()
        except TimeoutError as error:
            raise Unavailable(f"reading {wanted}: all {self._settings.consumers_max} consumers are busy") from error
        pooled = self._acquire(wanted)
        reading = self._loop.run_in_executor(pooled.thread, self._read, pooled, wanted)
        # If the reader is cancelled, its consumer stays busy until the read ends, and then returns to the pool.
        reading.add_done_callback(partial(self._release, pooled))
        return await asyncio.shield(reading)

    def forget(self, topic: str) -> None:
        """Unassign the topic: it is or was deleted, so no consumer may continue at its offset."""
        for pooled in self._idle:
            if pooled.reader is not None and pooled.reader.assigned is not None and pooled.reader.assigned[0] == topic:
                self._run_in_thread(pooled, pooled.reader.pause)

    async def close(self) -> None:
        """Wait for the reads in progress, then close every consumer."""
        self._closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for _ in range(self._settings.consumers_max):
            await self._free.acquire()
        for pooled in self._idle:
            self._close(pooled)
        self._idle.clear()
        self._count = 0
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _acquire(self, wanted: LogSlice) -> _PooledConsumer:
        best = max(self._idle, key=lambda pooled: pooled.fitness(wanted), default=None)
        if best is None or (best.fitness(wanted) == 0 and self._count < self._settings.consumers_max):
            self._count += 1
            return _PooledConsumer()
        self._idle.remove(best)
        return best

    def _read(self, pooled: _PooledConsumer, wanted: LogSlice) -> RecordPage:
        reader = pooled.reader
        if reader is None:
            reader = pooled.reader = SliceReader(self._settings, self._metrics)
        try:
            return reader.read(wanted)
        except NotFound:  # a client may keep this answer long after the topic was created again
            pooled.reader = None
            self._close_reader(reader)
            raise

    def _release(self, pooled: _PooledConsumer, reading: asyncio.Future[RecordPage]) -> None:
        if not reading.cancelled():
            reading.exception()  # the caller may have been cancelled
        pooled.idle_since = self._loop.time()
        pooled.paused = False
        self._idle.append(pooled)
        if self._sweep_timer is None and not self._closed:
            self._sweep_timer = self._loop.call_later(_PAUSE_AFTER_S, self._sweep)
        self._free.release()

    def _sweep(self) -> None:
        """Pause the consumers that are idle, and close those that are idle for long."""
        now = self._loop.time()
        self._sweep_timer = None
        for pooled in list(self._idle):
            if now - pooled.idle_since >= self._settings.consumer_idle_ms / 1000:
                self._idle.remove(pooled)
                self._count -= 1
                self._close(pooled)
            elif not pooled.paused and now - pooled.idle_since >= _PAUSE_AFTER_S and pooled.reader is not None:
                pooled.paused = True
                self._run_in_thread(pooled, pooled.reader.pause)
        if self._idle:
            self._sweep_timer = self._loop.call_later(_PAUSE_AFTER_S, self._sweep)

    def _close(self, pooled: _PooledConsumer) -> None:
        if pooled.reader is not None:
            self._run_in_thread(pooled, partial(self._close_reader, pooled.reader))
        pooled.thread.shutdown(wait=False)

    def _close_reader(self, reader: SliceReader) -> None:
        reader.close()
        self._metrics.count("kafka_consumer_closed", kind="read")

    def _run_in_thread(self, pooled: _PooledConsumer, call: Callable[[], None]) -> None:
        task = self._loop.run_in_executor(pooled.thread, call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
