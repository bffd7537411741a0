"""Which thread polls: the producer's own, then the loop until it finds no report; a failing poll stops neither."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from typing import Any

import pytest

from tidebook.core.errors import OutcomeUnknown
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka import producer as producing
from tidebook.log.kafka.producer import KafkaProducer
from tidebook.log.port import Acknowledged, Outgoing
from tidebook.runtime.metrics import Metrics


class Report:
    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000


class Client:
    """Acknowledges each record at the next poll, and records the thread of that poll."""

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
    reported: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    producer.send(Outgoing("t", 0, b"k", b"v"), reported.set_result)
    async with asyncio.timeout(30):
        sent: Acknowledged = await reported
    return sent


class Late(Client):
    """Acknowledges at most `may` records."""

    def __init__(self, may: int) -> None:
        super().__init__()
        self.may = may

    def poll(self, timeout_s: float) -> int:
        if len(self.acknowledged_in) >= self.may:
            time.sleep(min(timeout_s, 0.001))
            return 0
        super().poll(timeout_s)
        return self.poll(0)


async def test_after_the_reports_of_the_thread_the_loop_polls_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = opened(monkeypatch, client := Late(may=0), Metrics())
    done, results = asyncio.Event(), list[object]()

    def on_sent(result: object) -> None:
        results.append(result)
        client.may = 10  # while the loop handles the reports of the thread
        if len(results) == 10:
            done.set()

    for _ in range(10):
        producer.send(Outgoing("t", 0, b"k", b"v"), on_sent)
    while producer.in_flight < 10:  # noqa: ASYNC110 - a flush sets no event
        await asyncio.sleep(0)
    client.may = 4
    async with asyncio.timeout(30):
        await done.wait()
    here = threading.get_ident()
    assert here not in client.acknowledged_in[:4]
    assert client.acknowledged_in[4:] == [here] * 6
    await producer.close()


async def test_the_thread_polls_again_when_the_loop_finds_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = opened(monkeypatch, client := Client(), Metrics())
    for _ in range(3):
        await append(producer)
        async with asyncio.timeout(30):
            while not producer.thread_polls:  # noqa: ASYNC110 - the end of polling in the loop sets no event
                await asyncio.sleep(0.001)
    assert threading.get_ident() not in client.acknowledged_in
    await producer.close()


async def test_a_failing_callback_does_not_affect_the_results_of_other_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
    producer = opened(monkeypatch, Client(), Metrics())

    def fail(_: object) -> None:
        raise RuntimeError("mine")

    producer.send(Outgoing("t", 0, b"k", b"v"), fail)
    assert (await append(producer)).offset == 7
    assert failures == ["mine"]
    await producer.close()


def test_the_thread_ends_when_its_loop_was_closed_without_closing_the_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producers: list[KafkaProducer] = []

    async def main() -> None:
        producers.append(opened(monkeypatch, Client(), Metrics()))

    asyncio.run(main())
    producers[0]._thread.join(30)
    assert not producers[0]._thread.is_alive()


async def test_a_failing_poll_does_not_affect_the_results_of_later_records(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    producer = opened(monkeypatch, Client(SystemError("from within the client")), metrics)
    assert (await append(producer)).offset == 7
    assert metrics.counted("kafka_callback_failed") == 1
    await producer.close()


class Unreadable(Report):
    def timestamp(self) -> tuple[int, int]:
        raise SystemError("from within the client")


async def test_an_acknowledgement_that_cannot_be_read_is_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = opened(monkeypatch, Client(), Metrics())
    monkeypatch.setattr(Report, "timestamp", Unreadable.timestamp)
    assert isinstance(await append(producer), OutcomeUnknown)
    await producer.close()
