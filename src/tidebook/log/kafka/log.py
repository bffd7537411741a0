"""The log on Kafka: what the port promises, put together from a producer, a pool of consumers, a tail and an admin."""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from functools import partial

from tidebook.core.errors import InvalidInput, NotFound, TidebookError, TooLarge, Unavailable
from tidebook.core.metrics import Metrics
from tidebook.core.settle import settle
from tidebook.log.kafka.offsets import Offsets, Which
from tidebook.log.kafka.pool import ConsumerPool
from tidebook.log.kafka.producer import KafkaProducer
from tidebook.log.kafka.reading import Slice, lost
from tidebook.log.kafka.route import RECORD_FRAME_BYTES, Route
from tidebook.log.kafka.settings import KafkaSettings
from tidebook.log.kafka.tail import Place, Tail
from tidebook.log.kafka.topics import FRAME_BYTES, KafkaTopic, Topics, unknown
from tidebook.log.port import Batch, Many, OnSent, OnSentMany, Outgoing, Sent, TopicState, one_of

#: A followed partition that has news brings it within this time, or a consumer of the pool fetches it.
_TAIL_PATIENCE_S = 0.1
#: How often a wait without news looks whether the topic is still there.
_LOOK_EVERY_S = 5.0


async def open_kafka_log(settings: KafkaSettings, *, metrics: Metrics) -> KafkaLog:
    """A log on a Kafka cluster. Nothing connects before it is used."""
    return KafkaLog(settings, metrics=metrics)


#: Asking for the process id costs half a microsecond a record: the child of a fork is told instead.
_open_logs: weakref.WeakSet[KafkaLog] = weakref.WeakSet()


def _in_child() -> None:
    for log in list(_open_logs):
        log._routes.clear()
        log._forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class KafkaLog:
    """Implements `tidebook.log.port.Log`. Belongs to the event loop and the process that opened it."""

    indexed_by_key = False
    #: A leader that was cut off may still answer: only an acknowledged record is a barrier.
    end_is_linearizable = False

    def __init__(self, settings: KafkaSettings, *, metrics: Metrics) -> None:
        self.settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._forked = False
        _open_logs.add(self)
        self._known: dict[str, KafkaTopic] = {}
        #: Records of topics that are being looked up, in the order in which they were sent.
        self._unplaced: dict[str, list[tuple[Outgoing, OnSent]]] = {}
        self._placing: set[asyncio.Task[None]] = set()
        #: Ends that were seen: at least so far there are records.
        self._ends: dict[Place, int] = {}
        #: The short way for topics that were sent to.
        self._routes: dict[str, Route] = {}
        self._producers: dict[int, KafkaProducer] = {}
        self._lazy_topics: Topics | None = None
        self._lazy_offsets: Offsets | None = None
        self._lazy_pool: ConsumerPool | None = None
        self._lazy_tail: Tail | None = None

    # ---- topics

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> TopicState:
        made = await self._topics().create(topic, partitions, limit_bytes=limit_bytes, keep_forever=keep_forever)
        known = self._learn(topic, made, warm=True)
        await self._producer(known).learn(topic)
        return known.state

    async def topic(self, topic: str) -> TopicState | None:
        found = await self._topics().find(topic)
        if found is None:
            self._forget(topic)
            return None
        return self._learn(topic, found, warm=True).state

    async def topics(self) -> list[str]:
        return await self._topics().names()

    async def delete_topic(self, topic: str) -> None:
        await self._topics().delete(topic)
        self._forget(topic)

    def _learn(self, topic: str, found: KafkaTopic, *, warm: bool = False) -> KafkaTopic:
        known = self._known.get(topic)
        if known is not None and known.state.topic_id != found.state.topic_id:
            self._forget(topic)
        self._known[topic] = found
        self._routes.pop(topic, None)
        if warm:  # a new producer needs half a second until it may send: whoever opens a topic will need it
            self._producer(found)
        return found

    def _forget(self, topic: str) -> None:
        self._known.pop(topic, None)
        self._routes.pop(topic, None)
        for place in [place for place in self._ends if place[0] == topic]:
            del self._ends[place]
        if self._lazy_pool is not None:
            self._lazy_pool.forget(topic)
        if self._lazy_tail is not None:
            self._lazy_tail.forget(topic)

    async def _check(self, topic: str, partition: int) -> KafkaTopic:
        """The topic, looked up where it or the partition is not known yet."""
        known = self._known.get(topic)
        if known is None or not 0 <= partition < known.state.partitions:
            found = await self._topics().find(topic)
            if found is None:
                raise unknown(topic)
            known = self._learn(topic, found)
            if not 0 <= partition < known.state.partitions:
                raise unknown(topic, partition)
        return known

    async def _check_again(self, topic: str, partition: int) -> None:
        self._forget(topic)
        await self._check(topic, partition)

    # ---- writing

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        route = self._routes.get(record.topic)
        if route is not None and route.takes(record):
            route.send(record, on_sent)
        else:
            self._send_checked(record, on_sent)

    def send_many(self, many: Many, on_sent: OnSentMany) -> None:
        route = self._routes.get(many.topic)
        if route is not None and route.takes_all(many):
            route.send_many(many, on_sent)
        else:
            for place in range(len(many.values)):
                self.send(many.record(place), one_of(on_sent, place))

    def _send_checked(self, record: Outgoing, on_sent: OnSent) -> None:
        """What is not plainly right: a topic that is met first, headers, or something to refuse."""
        known = self._known.get(record.topic)
        if self._closed or self._forked:
            self._loop.call_soon(on_sent, self._unusable())
        elif record.topic in self._unplaced or known is None or not 0 <= record.partition < known.state.partitions:
            self._send_placed(record, on_sent)  # behind what waits, even where another looked it up meanwhile
        elif len(record.value) > known.limit_bytes or _frame(record) > FRAME_BYTES:
            self._loop.call_soon(on_sent, _too_large(known, record))
        else:
            route = self._routes[record.topic] = Route(known, self._producer(known))
            route.send(record, on_sent)

    def _send_placed(self, record: Outgoing, on_sent: OnSent) -> None:
        """Look the topic up first; what is sent meanwhile to the same unknown place waits behind it."""
        unplaced = self._unplaced.get(record.topic)
        if unplaced is not None:
            unplaced.append((record, on_sent))
            return
        self._unplaced[record.topic] = [(record, on_sent)]
        task = self._loop.create_task(self._place(record.topic))
        self._placing.add(task)
        task.add_done_callback(self._placing.discard)

    async def append(self, record: Outgoing) -> Sent:
        future: asyncio.Future[Sent] = self._loop.create_future()
        self.send(record, partial(settle, future))
        return await future

    async def _place(self, topic: str) -> None:
        """Look a topic up, then send what waits for it."""
        error: TidebookError | None = None
        try:
            found = await self._topics().find(topic)
            known = None if found is None else self._learn(topic, found)
        except TidebookError as failure:
            known, error = None, failure
        for record, on_sent in self._unplaced.pop(topic):
            if known is None:
                self._loop.call_soon(on_sent, error or unknown(topic))
            elif not 0 <= record.partition < known.state.partitions:
                self._loop.call_soon(on_sent, unknown(topic, record.partition))
            else:
                self.send(record, on_sent)

    def _producer(self, known: KafkaTopic) -> KafkaProducer:
        """The producer whose batches are below the topic's limit: topics of the usual limit share one."""
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
    ) -> Batch:
        if start < 0 or limit < 1:
            raise InvalidInput(f"a read begins at offset 0 or later and has a limit of 1 or more, not {start}, {limit}")
        await self._check(topic, partition)
        if start >= stop:
            return Batch((), start)
        wanted = Slice(
            topic, partition, start, await self._stop(topic, partition, start, stop), key, limit, limit_bytes
        )
        if wanted.stop <= start:
            return Batch((), start)
        page = await self._read_tail(wanted)
        if page is not None:
            return page
        try:
            return await self._pool().read(wanted)
        except NotFound:  # a broker that has just started may not know it yet
            await self._check_again(topic, partition)
            return await self._pool().read(wanted)

    async def _stop(self, topic: str, partition: int, start: int, stop: int) -> int:
        """`stop`, or the partition's end where that comes first: what is not there is not waited for."""
        place = (topic, partition)
        end = self._ends.get(place, -1)
        if stop > end and end <= start:
            end = await self._ask(topic, partition, "end")
            if end < start:
                raise lost(topic, partition, start, await self._ask(topic, partition, "start"), end)
        return min(stop, end)

    async def _read_tail(self, wanted: Slice) -> Batch | None:
        followed = self._lazy_tail.get((wanted.topic, wanted.partition)) if self._lazy_tail is not None else None
        if followed is None:
            return None
        if followed.next_offset == wanted.start:  # it is there, so it is on its way
            await followed.wait(wanted.start, _TAIL_PATIENCE_S)
        page = followed.read(wanted)
        if page is not None:
            self._metrics.count("kafka_tail_read")
        return page

    async def start(self, topic: str, partition: int) -> int:
        await self._check(topic, partition)
        return await self._ask(topic, partition, "start")

    async def end(self, topic: str, partition: int) -> int:
        await self._check(topic, partition)
        return await self._ask(topic, partition, "end")

    async def _ask(self, topic: str, partition: int, which: Which) -> int:
        try:
            offset = await self._offsets().ask(topic, partition, which)
        except NotFound:  # a broker that has just started may not know it yet
            await self._check_again(topic, partition)
            offset = await self._offsets().ask(topic, partition, which)
        if which == "end":
            self._ends[topic, partition] = offset
        return offset

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        await self._check(topic, partition)
        start, end = await asyncio.gather(self._ask(topic, partition, "start"), self._ask(topic, partition, "end"))
        if before > start:
            await self._topics().truncate(topic, partition, min(before, end))
            if self._lazy_pool is not None:
                self._lazy_pool.forget(topic)
            if self._lazy_tail is not None:
                self._lazy_tail.forget(topic)

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        await self._check(topic, partition)
        deadline = math.inf if timeout_s is None else self._loop.time() + timeout_s
        while True:
            followed = self._tail().get((topic, partition))
            if followed is None:
                end = await self._ask(topic, partition, "end")
                if end > offset:
                    return True
                followed = self._tail().follow((topic, partition), end)
            left = max(0.0, deadline - self._loop.time())
            news = await followed.wait(offset, min(left, _LOOK_EVERY_S))
            if news or (news is False and left <= _LOOK_EVERY_S):
                return bool(news)
            if news is False and await self._ended_elsewhere(topic, partition, followed.next_offset):
                self._tail().forget(topic)

    async def _ended_elsewhere(self, topic: str, partition: int, followed_to: int) -> bool:
        """Whether a followed partition is no longer what it was: the client does not tell of a topic that is gone."""
        try:
            return await self._ask(topic, partition, "end") != followed_to
        except Unavailable:
            return False  # it may come back, and then the tail goes on

    # ---- clients, made when they are first used

    def _in_use(self) -> None:
        if self._closed or self._forked:
            raise self._unusable()

    def _unusable(self) -> Unavailable:
        if self._closed:
            return Unavailable("this log is closed: open it again")
        return Unavailable("this log was opened before a fork: open one in the child")

    def _topics(self) -> Topics:
        self._in_use()
        if self._lazy_topics is None:
            self._lazy_topics = Topics(self.settings)
        return self._lazy_topics

    def _offsets(self) -> Offsets:
        self._in_use()
        if self._lazy_offsets is None:
            self._lazy_offsets = Offsets(self.settings)
        return self._lazy_offsets

    def _pool(self) -> ConsumerPool:
        self._in_use()
        if self._lazy_pool is None:
            self._lazy_pool = ConsumerPool(self.settings, self._metrics)
        return self._lazy_pool

    def _tail(self) -> Tail:
        self._in_use()
        if self._lazy_tail is None:
            self._lazy_tail = Tail(self.settings, self._metrics)
        return self._lazy_tail

    async def close(self) -> None:
        if self._closed or self._forked:
            return
        while self._placing:
            await asyncio.gather(*self._placing, return_exceptions=True)
        self._closed = True
        self._routes.clear()
        parts = (*self._producers.values(), self._lazy_pool, self._lazy_tail, self._lazy_offsets, self._lazy_topics)
        await asyncio.gather(*(part.close() for part in parts if part is not None))


def _frame(record: Outgoing) -> int:
    size = RECORD_FRAME_BYTES + (0 if record.key is None else len(record.key))
    for name, value in record.headers:
        size += 16 + 4 * len(name) + len(value)
    return size


def _too_large(known: KafkaTopic, record: Outgoing) -> TooLarge:
    if len(record.value) > known.limit_bytes:
        return TooLarge("the record", size_bytes=len(record.value), limit_bytes=known.limit_bytes)
    return TooLarge("the record's key and headers", size_bytes=_frame(record), limit_bytes=FRAME_BYTES)
