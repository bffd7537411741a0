"""Closing the log on Kafka while requests are in flight, also by a caller that is cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError

from tidebook.core.errors import OutcomeUnknown, TidebookError, Unavailable
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka import offsets as offsets_module
from tidebook.log.kafka import producer as producing
from tidebook.log.kafka import topics as topics_module
from tidebook.log.kafka.consumer_pool import ConsumerPool, LogSlice, SliceReader
from tidebook.log.kafka.log import KafkaLog
from tidebook.log.kafka.offsets import Offsets
from tidebook.log.kafka.producer import KafkaProducer
from tidebook.log.kafka.topics import KafkaTopic, Topics
from tidebook.log.port import Acknowledged, Outgoing, RecordPage, TopicState
from tidebook.runtime.metrics import Metrics

SETTINGS = KafkaSettings(servers=("h:1",))
TOPIC = KafkaTopic(TopicState("t", "id", 1), 1000, 10**6)


class Silent:
    """A client without a broker: it takes `room` records, and reports them only when it is purged."""

    def __init__(self, *, room: int = 1) -> None:
        self._room = room
        self._taken: list[Any] = []
        self._purged = False

    def produce(self, _: str, __: bytes, ___: bytes, ____: int, on_delivery: Any) -> None:
        if len(self._taken) == self._room:
            raise BufferError
        self._taken.append(on_delivery)

    def poll(self, timeout_s: float) -> int:
        time.sleep(min(timeout_s, 0.002))
        while self._purged and self._taken:
            self._taken.pop(0)(KafkaError(KafkaError._PURGE_INFLIGHT), self)
        return 0

    def offset(self) -> None: ...

    def purge(self, *_: Any, **__: Any) -> None:
        self._purged = True

    def list_topics(self, *_: Any, timeout: float) -> None:
        time.sleep(timeout)


async def test_a_cancelled_close_stops_the_producer_and_every_record_gets_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producing, "connect", lambda *_, **__: Silent())
    producer = KafkaProducer(SETTINGS, Metrics(), batch_bytes=1000)
    results: list[Acknowledged | TidebookError] = []
    for value in (b"given to the client", b"waits in this process"):
        producer.send(Outgoing("t", 0, b"k", value), results.append)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await producer.close()
    assert not producer._thread.is_alive()
    assert not hasattr(producer, "_client")
    assert sorted(type(each).__name__ for each in results) == [OutcomeUnknown.__name__, Unavailable.__name__]


async def test_a_producer_whose_close_is_cancelled_while_it_stops_is_stopped_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producing, "connect", lambda *_, **__: Silent())
    producer = KafkaProducer(SETTINGS, Metrics(), batch_bytes=1000)
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # nothing is in flight, so closing joins the thread now
    closing.cancel()
    await asyncio.wait([closing])
    assert producer._stopped is not None
    await producer._stopped
    assert not hasattr(producer, "_client")
    assert not producer._thread.is_alive()


async def test_closing_waits_no_longer_for_metadata_than_for_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "connect", lambda *_, **__: Silent())
    settings = KafkaSettings(servers=("h:1",), request_timeout_ms=50, send_timeout_ms=30_000)
    producer = KafkaProducer(settings, Metrics(), batch_bytes=1000)
    refreshing = asyncio.create_task(producer.refresh_metadata("t"))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await producer.close()
        await refreshing


class Gate:
    """A lookup of topics that returns only after the gate has been opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.closed = False

    async def find(self, _: str) -> KafkaTopic:
        await self.opened.wait()
        return TOPIC

    async def create(self, topic: str, _: int, **__: Any) -> KafkaTopic:
        return await self.find(topic)

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        self.closed = True
        self.opened.set()


@pytest.mark.parametrize("call", ["create_topic", "topic"])
async def test_a_topic_that_is_found_after_closing_opens_no_producer(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(producing, "connect", lambda *_, **__: Silent())
    log = KafkaLog(SETTINGS, metrics=Metrics())
    monkeypatch.setattr(log, "_topics", Gate())
    before = threading.enumerate()
    requested = asyncio.create_task(log.create_topic("t", 1) if call == "create_topic" else log.topic("t"))
    await asyncio.sleep(0)
    await log.close()
    with pytest.raises(Unavailable, match="closed"):
        await requested
    assert "tidebook-kafka-producer" not in [each.name for each in threading.enumerate() if each not in before]


async def test_a_close_that_is_cancelled_while_a_topic_is_looked_up_fails_its_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = KafkaLog(SETTINGS, metrics=Metrics())
    monkeypatch.setattr(log, "_topics", gate := Gate())
    appending = asyncio.create_task(log.append(Outgoing("t", 0, b"k", b"v")))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await log.close()
    assert gate.closed
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable, match="closed"):
            await appending


async def test_a_part_that_fails_to_close_does_not_keep_the_others_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing() -> None:
        raise SystemError("from within the client")

    log = KafkaLog(SETTINGS, metrics=Metrics())
    monkeypatch.setattr(log._pool, "close", failing)
    monkeypatch.setattr(log, "_topics", gate := Gate())
    with pytest.raises(SystemError):
        await log.close()
    assert gate.closed


class Unanswered:
    """An admin client that never answers: librdkafka forgets the requests in flight when it is closed."""

    def describe_topics(self, *_: Any, **__: Any) -> dict[str, Future[Any]]:
        return {"t": Future()}


async def test_a_request_in_flight_fails_at_once_when_the_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics_module, "connect", lambda *_, **__: Unanswered())
    topics = Topics(SETTINGS)
    finding = asyncio.create_task(topics.find("t"))
    await asyncio.sleep(0.01)
    await topics.close()
    async with asyncio.timeout(1):
        with pytest.raises(Unavailable, match="closed"):
            await finding


async def test_a_cancelled_close_of_the_pool_closes_a_consumer_when_its_read_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proceed, closed = threading.Event(), threading.Event()

    def read(_: SliceReader, wanted: LogSlice) -> RecordPage:
        proceed.wait(10)
        return RecordPage((), wanted.start)

    monkeypatch.setattr(SliceReader, "read", read)
    monkeypatch.setattr(SliceReader, "close", lambda _: closed.set())
    pool = ConsumerPool(SETTINGS, Metrics())
    reading = asyncio.create_task(pool.read(LogSlice("t", 0, 0, 5, None, 10, 1000)))
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await pool.close()
    proceed.set()
    await reading
    assert await asyncio.to_thread(closed.wait, 10)


class SlowConsumer:
    """A consumer that answers after a moment."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def offsets_for_times(self, requests: list[Any], **_: Any) -> list[Any]:
        time.sleep(0.1)
        return requests

    def close(self) -> None:
        self.closed.set()


async def test_a_cancelled_close_also_closes_the_client_for_offsets_after_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer = SlowConsumer()
    monkeypatch.setattr(offsets_module, "new_consumer", lambda *_, **__: consumer)
    offsets = Offsets(SETTINGS)
    first = offsets.fetch(("t", 0, "end"))
    await asyncio.sleep(0.01)
    second = offsets.fetch(("t", 0, "end"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await offsets.close()
    await first
    with pytest.raises(Unavailable, match="closed"):
        await second
    assert await asyncio.to_thread(consumer.closed.wait, 10)
