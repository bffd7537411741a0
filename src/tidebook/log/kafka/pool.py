"""A bounded pool of consumers: a reader that pages on gets the one that stands where it left off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tidebook.core.errors import NotFound, Unavailable
from tidebook.core.metrics import Metrics
from tidebook.log.kafka.reading import Slice, SliceReader
from tidebook.log.kafka.settings import KafkaSettings
from tidebook.log.port import Batch

#: An idle consumer stops fetching after this long.
_REST_S = 1.0


class _Pooled:
    """A consumer, its thread, and since when it is idle."""

    __slots__ = ("idle_since", "reader", "resting", "thread")

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "tidebook-kafka-consumer")
        self.reader: SliceReader | None = None
        self.idle_since = 0.0
        self.resting = True

    def fit(self, wanted: Slice) -> int:
        """How well it stands for a read."""
        if self.reader is None or self.reader.place != (wanted.topic, wanted.partition):
            return 1 if self.reader is None or self.reader.place is None else 0
        return 3 if self.reader.next_offset == wanted.start else 2


class ConsumerPool:
    """Consumers for reads, made when they are needed and closed when they are not."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Pooled] = []
        self._count = 0
        self._free = asyncio.Semaphore(settings.consumers_max)
        self._sweeping: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._closed = False

    async def read(self, wanted: Slice) -> Batch:
        """Read a slice's next page with the consumer that stands nearest."""
        try:
            async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                await self._free.acquire()
        except TimeoutError as error:
            raise Unavailable(f"reading {wanted}: all {self._settings.consumers_max} consumers are busy") from error
        pooled = self._take(wanted)
        reading = self._loop.run_in_executor(pooled.thread, self._read, pooled, wanted)
        # A cancelled reader leaves its consumer busy: it comes back to the pool by itself.
        reading.add_done_callback(partial(self._give_back, pooled))
        return await asyncio.shield(reading)

    def forget(self, topic: str) -> None:
        """The topic begins or began another life: nobody may go on where they stand in it."""
        for pooled in self._idle:
            if pooled.reader is not None and pooled.reader.place is not None and pooled.reader.place[0] == topic:
                self._run(pooled, pooled.reader.rest)

    async def close(self) -> None:
        """Wait for the reads under way, then close every consumer."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for _ in range(self._settings.consumers_max):
            await self._free.acquire()
        for pooled in self._idle:
            self._close(pooled)
        self._idle.clear()
        self._count = 0
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, wanted: Slice) -> _Pooled:
        best = max(self._idle, key=lambda pooled: pooled.fit(wanted), default=None)
        if best is None or (best.fit(wanted) == 0 and self._count < self._settings.consumers_max):
            self._count += 1
            return _Pooled()
        self._idle.remove(best)
        return best

    def _read(self, pooled: _Pooled, wanted: Slice) -> Batch:
        reader = pooled.reader
        if reader is None:
            reader = pooled.reader = SliceReader(self._settings, self._metrics)
        try:
            return reader.read(wanted)
        except NotFound:  # a client may hold on to that, however long the topic has been there again
            pooled.reader = None
            self._let_go(reader)
            raise

    def _give_back(self, pooled: _Pooled, reading: asyncio.Future[Batch]) -> None:
        if not reading.cancelled():
            reading.exception()  # whoever asked may be gone
        pooled.idle_since = self._loop.time()
        pooled.resting = False
        self._idle.append(pooled)
        if self._sweeping is None and not self._closed:
            self._sweeping = self._loop.call_later(_REST_S, self._sweep)
        self._free.release()

    def _sweep(self) -> None:
        """Let idle consumers rest, and close those that have been idle for long."""
        now = self._loop.time()
        self._sweeping = None
        for pooled in list(self._idle):
            if now - pooled.idle_since >= self._settings.consumer_idle_ms / 1000:
                self._idle.remove(pooled)
                self._count -= 1
                self._close(pooled)
            elif not pooled.resting and now - pooled.idle_since >= _REST_S and pooled.reader is not None:
                pooled.resting = True
                self._run(pooled, pooled.reader.rest)
        if self._idle:
            self._sweeping = self._loop.call_later(_REST_S, self._sweep)

    def _close(self, pooled: _Pooled) -> None:
        if pooled.reader is not None:
            self._run(pooled, partial(self._let_go, pooled.reader))
        pooled.thread.shutdown(wait=False)

    def _let_go(self, reader: SliceReader) -> None:
        reader.close()
        self._metrics.count("kafka_consumer_closed", kind="read")

    def _run(self, pooled: _Pooled, call: Callable[[], None]) -> None:
        task = self._loop.run_in_executor(pooled.thread, call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
