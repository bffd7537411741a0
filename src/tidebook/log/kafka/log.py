"""The Kafka adapter of the log port: producers, a pool of consumers, a tail and an admin client."""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from tidebook.core.errors import InvalidInput, LogLost, NotFound, TidebookError, TooLarge, Unavailable
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.consumer_pool import ConsumerPool, EndsEarly, LogSlice
from tidebook.log.kafka.offsets import Offsets, Which
from tidebook.log.kafka.producer import KafkaProducer
from tidebook.log.kafka.tail import LogTail, PartitionKey
from tidebook.log.kafka.topics import FRAME_BYTES, KafkaTopic, Topics, closed_error, not_found
from tidebook.log.port import (
    Acknowledged,
    OnSent,
    OnSentMany,
    Outgoing,
    RecordColumns,
    RecordPage,
    TopicState,
    callback_for,
    ends_early,
)
from tidebook.runtime.futures import resolve_future
from tidebook.runtime.metrics import Metrics

#: How long a read waits for a followed partition to deliver before it uses a consumer of the pool.
_TAIL_WAIT_S = 0.1
#: How often a wait checks that the topic still exists and was not recreated.
_END_CHECK_INTERVAL_S = 5.0
#: The part of FRAME_BYTES for the headers of a batch and of a record.
RECORD_FRAME_BYTES: Final = 96
_KEY_BYTES_MAX: Final = FRAME_BYTES - RECORD_FRAME_BYTES

T = TypeVar("T")


class ValidatedTopic(msgspec.Struct, frozen=True):
    """The fast path to a topic that was sent to before: its producer, and the limits of a record."""

    partitions: int
    limit_bytes: int
    producer: KafkaProducer


#: Comparing process ids costs half a microsecond for each record, so a fork marks all open logs in the child instead.
_open_logs: weakref.WeakSet[KafkaLog] = weakref.WeakSet()


def _mark_forked() -> None:
    for log in list(_open_logs):
        log._validated_topics.clear()
        log._forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


class KafkaLog:
    """Implements `tidebook.log.port.Log`. It belongs to one event loop and process; clients connect on first use."""

    indexed_by_key = False
    #: A leader that is cut off from the cluster may still answer, so only an acknowledged record is a barrier.
    end_is_linearizable = False

    def __init__(self, settings: KafkaSettings, *, metrics: Metrics) -> None:
        self.settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._forked = False
        _open_logs.add(self)
        self._known: dict[str, KafkaTopic] = {}
        #: Records of topics that are being looked up, in send order.
        self._awaiting_topic: dict[str, list[tuple[Outgoing, OnSent]]] = {}
        self._lookups: set[asyncio.Task[None]] = set()
        #: The last known end of each partition: records exist at least up to it.
        self._ends: dict[PartitionKey, int] = {}
        self._validated_topics: dict[str, ValidatedTopic] = {}
        self._producers: dict[int, KafkaProducer] = {}
        self._topics = Topics(settings)
        self._offsets = Offsets(settings)
        self._pool = ConsumerPool(settings, metrics)
        self._tail = LogTail(settings, metrics)

    def _check_usable(self) -> None:
        if self._closed or self._forked:
            raise self._unusable_error()

    def _unusable_error(self) -> TidebookError:
        if self._closed:
            return closed_error()
        return InvalidInput("this log was opened before a fork: open one in the child")

    # ---- topics

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> TopicState:
        self._check_usable()
        created = await self._topics.create(topic, partitions, limit_bytes=limit_bytes, keep_forever=keep_forever)
        known = self._remember(topic, created, warm=True)
        await self._producer(known).refresh_metadata(topic)
        return known.state

    async def topic(self, topic: str) -> TopicState | None:
        self._check_usable()
        found = await self._topics.find(topic)
        if found is None:
            self._forget(topic)
            return None
        return self._remember(topic, found, warm=True).state

    async def topics(self) -> list[str]:
        self._check_usable()
        return await self._topics.names()

    async def delete_topic(self, topic: str) -> None:
        self._check_usable()
        await self._topics.delete(topic)
        self._forget(topic)

    def _remember(self, topic: str, found: KafkaTopic, *, warm: bool = False) -> KafkaTopic:
        known = self._known.get(topic)
        if known is not None and known.state.topic_id != found.state.topic_id:
            self._forget(topic)
        self._known[topic] = found
        self._validated_topics.pop(topic, None)
        if warm:  # a new producer needs half a second before it can send, and an opened topic will be sent to
            self._producer(found)
        return found

    def _forget(self, topic: str) -> None:
        self._known.pop(topic, None)
        self._validated_topics.pop(topic, None)
        for partition_key in [partition_key for partition_key in self._ends if partition_key[0] == topic]:
            del self._ends[partition_key]
        self._pool.forget(topic)
        self._tail.forget(topic)

    async def _known_topic(self, topic: str, partition: int) -> KafkaTopic:
        """Return the topic; look it up if it or the partition is not known, and raise NotFound if it does not exist."""
        self._check_usable()
        known = self._known.get(topic)
        if known is None or not 0 <= partition < known.state.partitions:
            found = await self._topics.find(topic)
            if found is None:
                raise not_found(topic)
            known = self._remember(topic, found)
            if not 0 <= partition < known.state.partitions:
                raise not_found(topic, partition)
        return known

    async def _retry_not_found(self, topic: str, partition: int, request: Callable[[], Awaitable[T]]) -> T:
        """Retry if a client does not find a topic that exists: a broker that has just started may not know it."""
        self._check_usable()
        try:
            return await request()
        except NotFound:
            self._forget(topic)
            await self._known_topic(topic, partition)
            return await request()

    # ---- writing

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        topic = self._validated_topics.get(record.topic)
        if (
            topic is not None
            and 0 <= record.partition < topic.partitions
            and len(record.value) <= topic.limit_bytes
            and not record.headers
            and (record.key is None or len(record.key) <= _KEY_BYTES_MAX)
        ):
            topic.producer.send(record, on_sent)
        else:
            self._send_checked(record, on_sent)

    def send_many(self, columns: RecordColumns, on_sent: OnSentMany) -> None:
        topic, partitions = self._validated_topics.get(columns.topic), set(columns.partitions)
        if (
            topic is not None
            and partitions
            and min(partitions) >= 0
            and max(partitions) < topic.partitions
            and max(map(len, columns.values)) <= topic.limit_bytes
            and max(map(len, columns.keys)) <= _KEY_BYTES_MAX
        ):
            topic.producer.send_many(columns, on_sent)
        else:
            for index in range(len(columns.values)):
                self.send(columns.record(index), callback_for(on_sent, index))

    def _send_checked(self, record: Outgoing, on_sent: OnSent) -> None:
        """Send a record that is not on the fast path: to an unknown topic, with headers, or one to reject."""
        known, awaiting = self._known.get(record.topic), self._awaiting_topic.get(record.topic)
        if self._closed or self._forked:
            self._loop.call_soon(on_sent, self._unusable_error())
        elif awaiting is not None:  # keep the send order, even if the topic was found meanwhile
            awaiting.append((record, on_sent))
        elif known is None or not 0 <= record.partition < known.state.partitions:
            self._awaiting_topic[record.topic] = [(record, on_sent)]
            task = self._loop.create_task(self._look_up(record.topic))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)
        elif len(record.value) > known.limit_bytes:
            limit_bytes = known.limit_bytes
            error = TooLarge("the record", size_bytes=len(record.value), limit_bytes=limit_bytes)
            self._loop.call_soon(on_sent, error)
        elif (frame_bytes := _frame_bytes(record)) > FRAME_BYTES:
            error = TooLarge("the record's key and headers", size_bytes=frame_bytes, limit_bytes=FRAME_BYTES)
            self._loop.call_soon(on_sent, error)
        else:
            producer = self._producer(known)
            self._validated_topics[record.topic] = ValidatedTopic(known.state.partitions, known.limit_bytes, producer)
            producer.send(record, on_sent)

    async def append(self, record: Outgoing) -> Acknowledged:
        future: asyncio.Future[Acknowledged] = self._loop.create_future()
        self.send(record, partial(resolve_future, future))
        return await future

    async def _look_up(self, topic: str) -> None:
        """Look up a topic, then send the records that wait for it."""
        error: TidebookError | None = None
        try:
            found = await self._topics.find(topic)
            known = None if found is None else self._remember(topic, found)
        except TidebookError as failure:
            known, error = None, failure
        for record, on_sent in self._awaiting_topic.pop(topic):
            if known is None:
                self._loop.call_soon(on_sent, error or not_found(topic))
            elif not 0 <= record.partition < known.state.partitions:
                self._loop.call_soon(on_sent, not_found(topic, record.partition))
            else:
                self.send(record, on_sent)

    def _producer(self, known: KafkaTopic) -> KafkaProducer:
        """Return the producer for the topic's batch limit; topics with the same limit share one."""
        self._check_usable()  # the log may have been closed while the topic was looked up
        producer = self._producers.get(known.batch_bytes_max)
        if producer is None:
            producer = KafkaProducer(self.settings, self._metrics, batch_bytes=known.batch_bytes_max)
            self._producers[known.batch_bytes_max] = producer
        return producer

    # ---- reading

    async def read(
        self,
        topic: str,
        partition: int,
        *,
        start: int,
        stop: int,
        key: bytes | None = None,
        limit: int = 1000,
        limit_bytes: int = 4_000_000,
    ) -> RecordPage:
        if start < 0 or limit < 1:
            raise InvalidInput(f"a read needs a start of at least 0 and a limit of at least 1, not {start} and {limit}")
        await self._known_topic(topic, partition)
        if start >= stop:
            return RecordPage((), start)
        requested = LogSlice(
            topic, partition, start, await self._clip_stop(topic, partition, start, stop), key, limit, limit_bytes
        )
        if requested.stop <= start:
            return RecordPage((), start)
        page = await self._read_tail(requested)
        if page is None:
            try:
                page = await self._retry_not_found(topic, partition, lambda: self._pool.read(requested))
            except EndsEarly as error:
                raise await self._shortened_error(topic, partition, error.offset, error.end) from error
            if page.next_offset <= start and (end := await self._fetch_offset(topic, partition, "end")) <= start:
                raise await self._shortened_error(topic, partition, requested.stop, end)
        return page

    async def _shortened_error(self, topic: str, partition: int, offset: int, end: int) -> TidebookError:
        """Return the error for a log that ends at `end`, although it was read or seen up to `offset` before.

        It is `LogLost` only if the topic was created again: a leader that is cut off, or that was elected just now,
        may report an earlier end. Clients that may know only this leader are discarded.
        """
        known, found = self._known.get(topic), await self._topics.find(topic)
        if known is None or found is None or known.state.topic_id != found.state.topic_id:
            start = await self._fetch_offset(topic, partition, "start")
            remedy = "the log ends before records that were read: its topic was created again"
            return LogLost(topic=topic, partition=partition, first=max(start, end), last=offset - 1, remedy=remedy)
        self._pool.reconnect()
        await self._offsets.reconnect()
        return ends_early(topic, partition, end, offset - 1)

    async def _clip_stop(self, topic: str, partition: int, start: int, stop: int) -> int:
        """Return `stop`, or the end of the partition if that is lower: a read does not wait for new records."""
        followed = self._tail.get((topic, partition))
        end = max(self._ends.get((topic, partition), -1), -1 if followed is None else followed.next_offset)
        if stop > end and end <= start:
            end = await self._fetch_offset(topic, partition, "end")
            if end < start:
                raise await self._shortened_error(topic, partition, start, end)
        return min(stop, end)

    async def _read_tail(self, requested: LogSlice) -> RecordPage | None:
        followed = self._tail.get((requested.topic, requested.partition))
        if followed is None:
            return None
        if followed.next_offset == requested.start:  # the record exists, so the tail is about to deliver it
            await followed.wait(requested.start, _TAIL_WAIT_S)
        page = followed.read(requested)
        if page is not None:
            self._metrics.count("kafka_tail_read")
        return page

    async def start(self, topic: str, partition: int) -> int:
        await self._known_topic(topic, partition)
        return await self._fetch_offset(topic, partition, "start")

    async def end(self, topic: str, partition: int) -> int:
        await self._known_topic(topic, partition)
        return await self._fetch_offset(topic, partition, "end")

    async def _fetch_offset(self, topic: str, partition: int, which: Which) -> int:
        offset = await self._retry_not_found(topic, partition, lambda: self._offsets.fetch((topic, partition, which)))
        if which == "end":
            self._ends[topic, partition] = offset
        return offset

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        await self._known_topic(topic, partition)
        start, end = await asyncio.gather(
            self._fetch_offset(topic, partition, "start"), self._fetch_offset(topic, partition, "end")
        )
        if before > start:
            await self._topics.truncate(topic, partition, min(before, end))
            self._pool.forget(topic)
            self._tail.forget(topic)

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        await self._known_topic(topic, partition)
        deadline = math.inf if timeout_s is None else self._loop.time() + timeout_s
        while True:
            followed = self._tail.get((topic, partition))
            if followed is None:
                end = await self._fetch_offset(topic, partition, "end")
                if end > offset:
                    return True
                self._check_usable()
                followed = self._tail.follow((topic, partition), end)
            left = max(0.0, deadline - self._loop.time())
            reached = await followed.wait(offset, min(left, _END_CHECK_INTERVAL_S))
            if reached or (reached is False and left <= _END_CHECK_INTERVAL_S):
                return bool(reached)
            if reached is False and await self._end_differs(topic, partition, followed.next_offset):
                self._tail.forget(topic)

    async def _end_differs(self, topic: str, partition: int, followed_to: int) -> bool:
        """Return whether the log ends elsewhere than the tail: the client does not report that a topic was deleted."""
        try:
            return await self._fetch_offset(topic, partition, "end") != followed_to
        except Unavailable:
            return False  # the broker may come back, and the tail then continues

    async def close(self) -> None:
        if self._closed or self._forked:
            return
        try:
            while self._lookups:
                await asyncio.wait(self._lookups)  # does not cancel them if the caller is cancelled
        finally:
            self._closed = True
            self._validated_topics.clear()
            # This waits until all are closed, even if the caller is cancelled or one of them fails.
            closed = await asyncio.gather(
                *(producer.close() for producer in self._producers.values()),
                self._pool.close(),
                self._tail.close(),
                self._offsets.close(),
                self._topics.close(),
                return_exceptions=True,
            )
        for error in filter(None, closed):
            raise error


def _frame_bytes(record: Outgoing) -> int:
    size = RECORD_FRAME_BYTES + (0 if record.key is None else len(record.key))
    for name, value in record.headers:
        size += 16 + 4 * len(name) + len(value)
    return size
