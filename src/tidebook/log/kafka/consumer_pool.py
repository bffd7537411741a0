"""Read slices of partitions with a bounded pool of consumers.

A read that continues another one gets the consumer that is already at its offset.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from tidebook.core.errors import Corrupt, LogLost, NotFound, Unavailable
from tidebook.kafka.client import new_consumer
from tidebook.kafka.errors import DAMAGED, OUT_OF_RANGE, REFUSED, UNKNOWN_TOPIC, failed
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.port import Record, RecordPage
from tidebook.runtime.futures import ignore_failure
from tidebook.runtime.metrics import Metrics

#: An idle consumer stops fetching after this time.
_PAUSE_AFTER_S = 1.0
#: Reads never wait for new records, so this only bounds how soon the consumer can be assigned elsewhere.
_FETCH_WAIT_MS = 1
#: Larger batches are slower.
_CONSUME_RECORDS_MAX = 1000
#: A read by key returns the records found so far after scanning this many.
SCANNED_RECORDS_MAX = 50_000
_POLL_S = 1.0

#: A `confluent_kafka.Message`; its stubs declare all results as optional, but only those of events are.
Message = Any


class LogSlice(msgspec.Struct, frozen=True):
    """The range of a partition that one read asks for, with its filter and limits."""

    topic: str
    partition: int
    start: int
    stop: int
    key: bytes | None
    limit: int
    limit_bytes: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} from {self.start}"


class SliceReader:
    """A consumer, its position, and the only thread that uses it; it connects at the first read."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._timeout_s = settings.request_timeout_ms / 1000
        self.thread = ThreadPoolExecutor(1, "tidebook-kafka-consumer")
        self.idle_since = 0.0
        self._client: Any = None
        #: The assigned partition, or None.
        self.assigned: tuple[str, int] | None = None
        self.next_offset = -1
        #: Topics whose leaders the client has requested.
        self._known: set[str] = set()
        #: Messages that were consumed and not returned yet.
        self._buffered: Sequence[Message] = ()

    def fitness(self, requested: LogSlice) -> int:
        """Rate the consumer's position for a read, from 0 (in another partition) to 3 (exactly at its start)."""
        if self.assigned != (requested.topic, requested.partition):
            return 1 if self.assigned is None else 0
        return 3 if self.next_offset == requested.start else 2

    def read(self, requested: LogSlice) -> RecordPage:
        """Return the next page of the slice; `stop` must not be after the end of the partition."""
        try:
            if self.assigned != (requested.topic, requested.partition) or self.next_offset != requested.start:
                self._assign(requested, requested.start)
            return self._read_page(requested)
        except NotFound:  # the client may cache this even if the topic is created again
            self.close()
            raise

    def _read_page(self, requested: LogSlice) -> RecordPage:
        try:
            page = SlicePage(requested)
            deadline = time.monotonic() + self._timeout_s
            while not page.full:
                messages = self._buffered or self._poll(page, deadline)
                if not messages:
                    break
                taken = page.take(messages)
                self._buffered = messages[taken:]
                if taken < len(messages) and messages[taken].error() is not None:
                    self._buffered = messages[taken + 1 :]
                    if self._ends_page(messages[taken], page, deadline):
                        break
            self.next_offset = page.next_offset
        except BaseException:
            self.assigned = None  # its position is unknown now, so the next read must assign it again
            raise
        # A read of a single record is a lookup that is not continued, so prefetching after it would be wasted.
        if requested.limit == 1 or (not self._buffered and self._caught_up()):
            self.pause()
        return RecordPage(tuple(page.records), page.next_offset)

    def pause(self) -> None:
        """Stop fetching; the next read assigns a partition again."""
        if self.assigned is not None:
            self._client.unassign()
            self.assigned, self._buffered = None, ()

    def close(self) -> None:
        """Close the client; the next read connects again."""
        client, self._client = self._client, None
        if client is not None:
            self.assigned, self._buffered = None, ()
            self._known.clear()
            client.close()
            self._metrics.count("kafka_consumer_closed", kind="read")

    def _assign(self, requested: LogSlice, offset: int) -> None:
        """Assign the slice's partition at `offset`, and nothing else."""
        began = time.perf_counter()
        if self._client is None:
            self._client = new_consumer(self._settings, fetch_wait_ms=_FETCH_WAIT_MS)
            self._metrics.count("kafka_consumer_opened", kind="read")
            self._metrics.time("kafka_consumer_init", time.perf_counter() - began)
        self._buffered = ()
        try:
            if self.assigned is not None:
                self._client.unassign()
            if requested.topic not in self._known:
                # Without a request, a client refreshes the leader of a new topic only once a second.
                self._client.list_topics(requested.topic, timeout=self._timeout_s)
                self._known.add(requested.topic)
            self._client.assign([TopicPartition(requested.topic, requested.partition, offset)])
        except KafkaException as error:
            self.assigned = None
            raise failed(error, f"reading {requested}") from error
        self.assigned, self.next_offset = (requested.topic, requested.partition), offset
        self._metrics.time("kafka_consumer_seek", time.perf_counter() - began)

    def _poll(self, page: SlicePage, deadline: float) -> Sequence[Message]:
        """Return the messages that are there, or wait for the first one; return none if the page may end here."""
        count = min(_CONSUME_RECORDS_MAX, page.room)
        messages: list[Message] = self._client.consume(count, 0)
        if messages:
            return messages
        began = time.perf_counter()
        while True:
            message = self._client.poll(_POLL_S)
            if message is not None:
                self._metrics.time("kafka_consumer_poll", time.perf_counter() - began)
                return [message, *(self._client.consume(count - 1, 0) if count > 1 else ())]
            if time.monotonic() > deadline:
                if page.next_offset > page.requested.start:
                    return ()
                raise Unavailable(
                    f"reading {page.requested}: Kafka sent nothing for {self._timeout_s:g} s: try again later"
                )

    def _ends_page(self, event: Message, page: SlicePage, deadline: float) -> bool:
        """Return whether an event in the stream ends the page; raise if it is an error."""
        requested = page.requested
        error: KafkaError = event.error()
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            if (event.topic(), event.partition()) != self.assigned:
                return False
            if event.offset() >= requested.stop:  # only gaps up to stop
                page.next_offset = requested.stop
                return True
            _, high = self._watermarks(requested)
            return high <= page.next_offset
        if code in OUT_OF_RANGE:
            self._check_range(page, deadline)
            return False
        if code in UNKNOWN_TOPIC or code in REFUSED:
            raise failed(error, f"reading {requested}")
        if code in DAMAGED:
            raise Corrupt(
                f"reading {requested}: Kafka sent a batch at offset {page.next_offset} that is damaged "
                f"({error.str()}): nothing after it can be read until the broker has an intact copy"
            )
        return False  # a reconnect, or the deadline, resolves it

    def _check_range(self, page: SlicePage, deadline: float) -> None:
        """Raise LogLost or EndsEarly if the page's next offset is outside the log; else assign it again and continue.

        The event may be of the position before the last assign; librdkafka stops fetching in either case.
        """
        requested, offset = page.requested, page.next_offset
        low, high = self._watermarks(requested)
        if offset < low:
            raise LogLost(
                topic=requested.topic,
                partition=requested.partition,
                first=offset,
                last=low - 1,
                remedy="keep records longer than replication may take",
            )
        if offset > high:
            raise EndsEarly(offset, high)
        if time.monotonic() > deadline:
            raise Unavailable(
                f"reading {requested}: for {self._timeout_s:g} s, Kafka has reported offset {offset} as out of range, "
                f"although the log begins at {low} and ends at {high}: try again later"
            )
        self._metrics.count("kafka_consumer_reassigned")
        self._assign(requested, offset)

    def _watermarks(self, requested: LogSlice) -> tuple[int, int]:
        found: tuple[int, int] | None
        try:
            found = self._client.get_watermark_offsets(
                TopicPartition(requested.topic, requested.partition), timeout=self._timeout_s
            )
        except KafkaException as error:
            raise failed(error, f"reading {requested}") from error
        if found is None:
            raise Unavailable(f"reading {requested}: Kafka did not report the log's start and end in time")
        return found

    def _caught_up(self) -> bool:
        assert self.assigned is not None
        found: tuple[int, int] | None = self._client.get_watermark_offsets(TopicPartition(*self.assigned), cached=True)
        return found is None or found[1] <= self.next_offset


class EndsEarly(Exception):
    """According to its broker, the log ends before the offset from which a read continues."""

    def __init__(self, offset: int, end: int) -> None:
        super().__init__(offset, end)
        self.offset = offset
        self.end = end


class SlicePage:
    """A page while it is being filled."""

    def __init__(self, requested: LogSlice) -> None:
        self.requested = requested
        self.records: list[Record] = []
        self.next_offset = requested.start
        self.full = False
        self._bytes = 0
        self._scanned = 0

    @property
    def room(self) -> int:
        """The number of messages that the page may still need."""
        left = self.requested.stop - self.next_offset
        return left if self.requested.key is not None else min(left, self.requested.limit - len(self.records))

    def take(self, messages: Sequence[Message]) -> int:
        """Add messages until the page is full or one of them is an event; return how many were taken."""
        requested, records = self.requested, self.records
        key, stop, limit, limit_bytes = requested.key, requested.stop, requested.limit, requested.limit_bytes
        size_bytes, next_offset = self._bytes, self.next_offset
        taken = 0
        for message in messages:
            if message.error() is not None:
                break
            offset = message.offset()
            if offset >= stop:
                next_offset = stop
                break
            if key is None or message.key() == key:
                value = message.value()
                size = len(value) if value is not None else 0
                if len(records) >= limit or (records and size_bytes + size > limit_bytes):
                    self.full = True
                    break
                size_bytes += size
                headers = tuple((name, value or b"") for name, value in message.headers() or ())
                records.append(Record(offset, message.timestamp()[1], message.key(), value, headers))
            taken += 1
            next_offset = offset + 1
        self._bytes, self.next_offset = size_bytes, next_offset
        self._scanned += taken
        if next_offset >= stop or len(records) >= limit or self._scanned >= SCANNED_RECORDS_MAX:
            self.full = True
        return taken


class ConsumerPool:
    """Opens consumers for reads on demand, and closes those that are idle."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._idle: list[SliceReader] = []
        self._count = 0
        self._free = asyncio.Semaphore(settings.consumers_max)
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._closed = False

    async def read(self, requested: LogSlice) -> RecordPage:
        """Read the next page of a slice with the best positioned idle consumer; raise Unavailable if all stay busy."""
        try:
            async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                await self._free.acquire()
        except TimeoutError as error:
            raise Unavailable(f"reading {requested}: all {self._settings.consumers_max} consumers are busy") from error
        best = max(self._idle, key=lambda reader: reader.fitness(requested), default=None)
        if best is None or (best.fitness(requested) == 0 and self._count < self._settings.consumers_max):
            self._count += 1
            best = SliceReader(self._settings, self._metrics)
        else:
            self._idle.remove(best)
        reading = self._loop.run_in_executor(best.thread, best.read, requested)
        # If the reader is cancelled, its consumer stays busy until the read ends, and then returns to the pool.
        reading.add_done_callback(partial(self._release, best))
        return await asyncio.shield(reading)

    def forget(self, topic: str) -> None:
        """Unassign a topic that was deleted or truncated: no consumer may continue at its offset."""
        for reader in self._idle:
            if reader.assigned is not None and reader.assigned[0] == topic:
                self._run_in_thread(reader, reader.pause)

    def reconnect(self) -> None:
        """Close the idle consumers, because their clients may keep asking a broker that no longer leads a partition."""
        for reader in self._idle:
            self._run_in_thread(reader, reader.close)

    async def close(self) -> None:
        """Wait for the reads in progress, then close every consumer."""
        self._closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for reader in self._idle:
            self._close(reader)
        self._idle.clear()
        for _ in range(self._settings.consumers_max):
            await self._free.acquire()
        await asyncio.shield(asyncio.gather(*self._tasks, return_exceptions=True))

    def _release(self, reader: SliceReader, reading: asyncio.Future[RecordPage]) -> None:
        ignore_failure(reading)  # the caller may have been cancelled
        if self._closed:  # `close` waits for it, unless its caller was cancelled
            self._close(reader)
            self._free.release()
            return
        reader.idle_since = self._loop.time()
        self._idle.append(reader)
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(_PAUSE_AFTER_S, self._sweep)
        self._free.release()

    def _sweep(self) -> None:
        """Pause the consumers that are idle, and close those that are idle for long."""
        now = self._loop.time()
        self._sweep_timer = None
        for reader in list(self._idle):
            if now - reader.idle_since >= self._settings.consumer_idle_ms / 1000:
                self._idle.remove(reader)
                self._count -= 1
                self._close(reader)
            elif reader.assigned is not None and now - reader.idle_since >= _PAUSE_AFTER_S:
                self._run_in_thread(reader, reader.pause)
        if self._idle:
            self._sweep_timer = self._loop.call_later(_PAUSE_AFTER_S, self._sweep)

    def _close(self, reader: SliceReader) -> None:
        self._run_in_thread(reader, reader.close)
        reader.thread.shutdown(wait=False)

    def _run_in_thread(self, reader: SliceReader, call: Callable[[], None]) -> None:
        task = self._loop.run_in_executor(reader.thread, call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
