"""Which thread polls: the loop at low latency and under load, else the thread; a failing poll stops neither."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest
from confluent_kafka import Message

from tidebook.core.errors import OutcomeUnknown
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka import poll_ownership
from tidebook.log.kafka import producer as producing
from tidebook.log.kafka.delivery import DeliveryCallback
from tidebook.log.kafka.poll_ownership import AckLatencyEstimator
from tidebook.log.kafka.producer import KafkaProducer
from tidebook.log.port import Acknowledged, Outgoing, RecordColumns
from tidebook.runtime.metrics import Metrics


class Report:
    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000


class Client:
    """Acknowledges each record at the next poll, and notes in which thread that was."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self._taken: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.acknowledged_in: list[int] = []

    def produce(self, _: str, __: bytes, ___: bytes, ____: int, on_delivery: Any) -> None:
        self._taken.put(on_delivery)

    def poll(self, timeout_s: float) -> int:
        if self._failures:
            raise self._failures.pop()
        try:
            on_delivery = self._taken.get(timeout=timeout_s) if timeout_s else self._taken.get_nowait()
        except queue.Empty:
            return 0
        self.acknowledged_in.append(threading.get_ident())
        on_delivery(None, Report())
        return 1

    def purge(self, *_: Any, **__: Any) -> None: ...

    def flush(self, *_: Any) -> None: ...


def opened(monkeypatch: pytest.MonkeyPatch, client: Client, metrics: Metrics) -> KafkaProducer:
    monkeypatch.setattr(producing, "connect", lambda *_, **__: client)
    return KafkaProducer(KafkaSettings(servers=("h:1",)), metrics, batch_bytes=1000)


async def append(producer: KafkaProducer) -> Acknowledged:
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    producer.send(Outgoing("t", 0, b"k", b"v"), told.set_result)
    async with asyncio.timeout(30):
        sent: Acknowledged = await told
    return sent


async def until_the_threads_turn(producer: KafkaProducer) -> None:
    async with asyncio.timeout(30):
        while producer._ownership.loop_owns:  # noqa: ASYNC110 - a turn that ends tells nobody
            await asyncio.sleep(0.001)


async def test_the_loop_polls_at_low_latency_and_the_thread_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poll_ownership, "LOW_LATENCY_S", 60.0)
    monkeypatch.setattr(poll_ownership, "BUSY_POLL_S", 60.0)
    monkeypatch.setattr(poll_ownership, "_IDLE_S", 60.0)
    client = Client()
    producer = opened(monkeypatch, client, Metrics())
    for _ in range(4):
        assert (await append(producer)).offset == 7
    here = threading.get_ident()
    # The first teaches that the broker is near; the second is met by the thread, which then stands still.
    assert client.acknowledged_in[0] != here
    assert client.acknowledged_in[2:] == [here, here]
    monkeypatch.setattr(poll_ownership, "LOW_LATENCY_S", 0.0)
    await append(producer)  # in the loop, and no longer near
    await until_the_threads_turn(producer)
    await append(producer)
    assert client.acknowledged_in[-1] != here
    await producer.close()


async def test_the_thread_polls_again_after_an_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_ownership, "LOW_LATENCY_S", 60.0)
    producer = opened(monkeypatch, Client(), Metrics())
    for _ in range(2):
        await append(producer)
    await until_the_threads_turn(producer)
    assert (await append(producer)).offset == 7
    await producer.close()


class Late(Client):
    """Acknowledges no more than it may."""

    def __init__(self, may: int) -> None:
        super().__init__()
        self.may = may
        self._late: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, on_delivery: Any) -> None:
        self._late.put((on_delivery, Message(topic, partition, 7, key, value, timestamp=(1, 1000))))

    def poll(self, timeout_s: float) -> int:
        while len(self.acknowledged_in) < self.may and not self._late.empty():
            on_delivery, message = self._late.get()
            self.acknowledged_in.append(threading.get_ident())
            on_delivery(None, message)
        return super().poll(min(timeout_s, 0.001))


@pytest.mark.parametrize("looks_max", [1_000_000, 2])
async def test_the_loop_polls_for_batches_but_not_forever(monkeypatch: pytest.MonkeyPatch, looks_max: int) -> None:
    monkeypatch.setattr(poll_ownership, "_EMPTY_POLLS_MAX", looks_max)
    producer = opened(monkeypatch, client := Late(may=20), Metrics())
    told = [asyncio.Event(), asyncio.Event()]
    values = [b"%d" % n for n in range(20)]
    for each in told:
        producer.send_many(RecordColumns("t", [0] * 20, [b"k"] * 20, values), lambda *_, each=each: each.set())
    async with asyncio.timeout(30):
        await told[0].wait()  # by the thread, which stands still from then on
        if looks_max == 2:
            await until_the_threads_turn(producer)
        client.may = 40
        await told[1].wait()
    here = threading.get_ident()
    assert set(client.acknowledged_in[:20]) != {here}
    assert (set(client.acknowledged_in[20:]) == {here}) == (looks_max > 2)
    await producer.close()


async def test_a_failing_poll_costs_no_later_record_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    producer = opened(monkeypatch, Client(SystemError("from within the client")), metrics)
    assert (await append(producer)).offset == 7
    assert metrics.counted("kafka_callback_failed") == 1
    await producer.close()


def test_one_slow_acknowledgement_does_not_change_the_estimate_and_several_do() -> None:
    learned = AckLatencyEstimator()
    for took_s in (0.0003, 0.0003, 0.001):
        learned.sent(1.0)
        learned.acknowledged(1.0 + took_s)
    assert learned.low_latency
    for _ in range(3):
        learned.sent(1.0)
        learned.acknowledged(1.002)
    assert not learned.low_latency


class Sender:
    def __init__(self) -> None:
        self.completed: list[Any] = []

    def delivery_error(self, *_: Any) -> Any:
        raise AssertionError


class Unreadable(Report):
    def timestamp(self) -> tuple[int, int]:
        raise SystemError("from within the client")


def test_an_acknowledgement_that_cannot_be_read_is_an_unknown_outcome() -> None:
    sender = Sender()
    sending = DeliveryCallback(sender, Outgoing("t", 0, b"k", b"v"), print, 0.0)
    sending(None, Unreadable())
    assert [type(each) for each in sender.completed] == [DeliveryCallback, OutcomeUnknown]
