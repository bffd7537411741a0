"""The tail: one consumer a process that follows the partitions somebody waits for.

What arrives wakes the waiters and is kept for a while, so that whoever was woken reads it from memory.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tidebook.core.metrics import Metrics
from tidebook.log.kafka.client import LOGGER, new_consumer
from tidebook.log.kafka.crossing import Crossing
from tidebook.log.kafka.faults import OUT_OF_RANGE, UNKNOWN_TOPIC
from tidebook.log.kafka.reading import Message, Slice, record_of
from tidebook.log.kafka.settings import KafkaSettings
from tidebook.log.port import Batch, Record

Place = tuple[str, int]

#: How long the broker holds a fetch that finds nothing; a partition that joins waits for the fetch in flight.
_FETCH_WAIT_MS = 50
_POLL_S = 0.025
_CONSUME_RECORDS_MAX = 1000
_SWEEP_S = 1.0


class Followed:
    """One followed partition, as the event loop sees it."""

    __slots__ = ("_bytes", "next_offset", "records", "used_at", "waiters")

    def __init__(self, next_offset: int) -> None:
        #: Everything below is known to be there; `records` are the last of it, without a gap.
        self.next_offset = next_offset
        self.records: list[Record] = []
        self.waiters: dict[asyncio.Future[bool], int] = {}
        self.used_at = 0.0
        self._bytes = 0

    @property
    def first_offset(self) -> int:
        """From here on, `records` hold all there is."""
        return self.records[0].offset if self.records else self.next_offset

    def take(self, records: list[Record], *, bytes_max: int) -> None:
        """The next records of the partition; the oldest go when there are too many bytes."""
        self.records += records
        self.next_offset = records[-1].offset + 1
        self._bytes += sum(_size(record) for record in records)
        if self._bytes > bytes_max:
            drop = 0
            while self._bytes > bytes_max // 2 and drop < len(self.records) - 1:
                self._bytes -= _size(self.records[drop])
                drop += 1
            del self.records[:drop]
        for waiter in [waiter for waiter, offset in self.waiters.items() if offset < self.next_offset]:
            del self.waiters[waiter]
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, offset: int, timeout_s: float | None) -> bool | None:
        """Wait for a record at or behind `offset`: True; None when it is followed no more; False when time ran out."""
        if self.next_offset > offset:
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiters[waiter] = offset
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter or None
        except TimeoutError:
            return False
        finally:
            self.waiters.pop(waiter, None)

    def read(self, wanted: Slice) -> Batch | None:
        """The slice's next page, if it lies in memory."""
        if not self.first_offset <= wanted.start < self.next_offset:
            return None
        found: list[Record] = []
        held = 0
        next_offset = min(wanted.stop, self.next_offset)
        for i in range(bisect_left(self.records, wanted.start, key=attrgetter("offset")), len(self.records)):
            record = self.records[i]
            if record.offset >= wanted.stop:
                break
            if wanted.key is not None and record.key != wanted.key:
                continue
            held += len(record.value or b"")
            if len(found) >= wanted.limit or (found and held > wanted.limit_bytes):
                next_offset = record.offset
                break
            found.append(record)
        return Batch(tuple(found), next_offset)


def _size(record: Record) -> int:
    return 100 + len(record.value or b"") + len(record.key or b"")


class Tail:
    """The followed partitions of one process, and the thread that follows them."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._crossing = Crossing()
        self._followed: dict[Place, Followed] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        #: (place, offset to follow it from, or None to leave it); None ends the thread.
        self._orders: queue.SimpleQueue[tuple[Place, int | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # ---- in the event loop

    def follow(self, place: Place, end: int) -> Followed:
        """Follow a partition from its end on, unless it is followed already."""
        followed = self._followed.get(place)
        if followed is None:
            followed = self._followed[place] = Followed(end)
            self._order(place, end)
        followed.used_at = self._loop.time()
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)
        return followed

    def get(self, place: Place) -> Followed | None:
        """A partition that is followed, or None."""
        followed = self._followed.get(place)
        if followed is not None:
            followed.used_at = self._loop.time()
        return followed

    def forget(self, topic: str) -> None:
        """The topic begins or began another life: its waiters look for themselves."""
        for place in [place for place in self._followed if place[0] == topic]:
            self._leave(place)

    async def close(self) -> None:
        """Stop following; waiters are told nothing."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for place in list(self._followed):
            self._leave(place)
        if self._thread is not None:
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join)
        self._crossing.close()

    def _order(self, place: Place, offset: int | None) -> None:
        self._orders.put((place, offset))
        if self._thread is None:
            client = new_consumer(self._settings, fetch_wait_ms=_FETCH_WAIT_MS)
            self._metrics.count("kafka_consumer_opened", kind="tail")
            self._thread = threading.Thread(target=self._run, args=(client,), name="tidebook-kafka-tail", daemon=True)
            self._thread.start()

    def _leave(self, place: Place) -> None:
        followed = self._followed.pop(place)
        self._order(place, None)
        for waiter in followed.waiters:
            if not waiter.done():
                waiter.set_result(False)

    def _sweep(self) -> None:
        idle_since = self._loop.time() - self._settings.tail_idle_ms / 1000
        for place, followed in list(self._followed.items()):
            if not followed.waiters and followed.used_at < idle_since:
                self._leave(place)
        self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep) if self._followed else None

    def _take(self, news: dict[Place, list[Record]]) -> None:
        for place, records in news.items():
            followed = self._followed.get(place)
            if followed is None:
                continue
            records = [record for record in records if record.offset >= followed.next_offset]
            if records:
                followed.take(records, bytes_max=self._settings.tail_bytes_max)

    def _lost(self, place: Place) -> None:
        if place in self._followed:
            self._leave(place)

    # ---- in the tail's thread

    def _run(self, client: Consumer) -> None:
        assigned: set[Place] = set()
        while self._obey(client, assigned):
            message = client.poll(_POLL_S)
            if message is not None:
                self._sort([message, *client.consume(_CONSUME_RECORDS_MAX - 1, 0)])
        client.close()
        self._metrics.count("kafka_consumer_closed", kind="tail")

    def _obey(self, client: Consumer, assigned: set[Place]) -> bool:
        """Carry out the orders that have come; with nothing to follow, wait for one. False: the end."""
        while True:
            try:
                order = self._orders.get(block=not assigned)
            except queue.Empty:
                return True
            if order is None:
                return False
            place, offset = order
            try:
                if place in assigned:
                    client.incremental_unassign([TopicPartition(*place)])
                    assigned.discard(place)
                if offset is not None:
                    client.incremental_assign([TopicPartition(*place, offset)])
                    assigned.add(place)
            except KafkaException as error:
                LOGGER.warning("following %s/%d: %s", *place, error)
                self._tell(self._lost, place)

    def _sort(self, messages: list[Message]) -> None:
        news: defaultdict[Place, list[Record]] = defaultdict(list)
        for message in messages:
            error = message.error()
            if error is None:
                news[message.topic(), message.partition()].append(record_of(message))
            elif error.code() in OUT_OF_RANGE or error.code() in UNKNOWN_TOPIC:
                self._tell(self._lost, (message.topic(), message.partition()))
            elif error.code() != KafkaError._PARTITION_EOF:
                LOGGER.info("following: %s", error)
        if news:
            self._tell(self._take, dict(news))

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        if not self._crossing.tell(call, *args):
            self._orders.put(None)  # the loop was closed under us
