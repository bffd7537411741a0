"""How the log on Kafka reacts to errors and delays of its clients, simulated by fake clients."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from confluent_kafka import KafkaError

from tidebook.core.errors import Corrupt, TidebookError, Unavailable
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka import consumer_pool as reading
from tidebook.log.kafka import producer as producing
from tidebook.log.kafka.consumer_pool import LogSlice, SliceReader
from tidebook.log.kafka.log import KafkaLog
from tidebook.log.kafka.producer import KafkaProducer
from tidebook.log.kafka.topics import KafkaTopic, Topics
from tidebook.log.port import Acknowledged, Outgoing, RecordColumns, TopicState
from tidebook.runtime.metrics import Metrics


class GatedTopics:
    """A lookup of topics, each of which returns only after the test opens its gate."""

    def __init__(self, topic: KafkaTopic) -> None:
        self._topic = topic
        self.gates: list[asyncio.Event] = []

    async def find(self, _: str) -> KafkaTopic:
        self.gates.append(asyncio.Event())
        await self.gates[-1].wait()
        return self._topic


class RecordingProducer:
    """A producer that only records the order of what it is given."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def send(self, record: Outgoing, _: Any) -> None:
        self.values.append(record.value)

    def send_many(self, many: RecordColumns, _: Any) -> None:
        self.values += many.values


async def test_records_keep_their_order_while_a_topic_is_looked_up_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read from a broker that has just started looks the topic up again, and so does a record sent meanwhile."""
    log = KafkaLog(KafkaSettings(servers=("h:1",)), metrics=Metrics())
    topics, recording = GatedTopics(KafkaTopic(TopicState("t", "id", 1), 1000, 10**6)), RecordingProducer()
    monkeypatch.setattr(log, "_topics", topics)
    monkeypatch.setattr(log, "_producer", lambda _: recording)
    again = asyncio.create_task(log._known_topic("t", 0))
    await asyncio.sleep(0)
    log.send(Outgoing("t", 0, b"k", b"1"), print)
    await asyncio.sleep(0)
    topics.gates[0].set()
    await again
    log.send(Outgoing("t", 0, b"k", b"2"), print)
    log.send_many(RecordColumns("t", [0, 0], [b"k", b"k"], [b"3", b"4"]), print)
    topics.gates[1].set()
    await asyncio.gather(*log._lookups)
    assert recording.values == [b"1", b"2", b"3", b"4"]


class FullClient:
    """A client whose queue is full."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def produce(self, *_: Any, **__: Any) -> None:
        raise BufferError

    def poll(self, timeout_s: float) -> int:
        time.sleep(min(timeout_s, 0.01))
        return 0

    def purge(self, *_: Any, **__: Any) -> None: ...

    def flush(self, *_: Any) -> None: ...


async def test_each_record_has_its_own_timeout_while_the_clients_queue_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producing, "connect", lambda *_, **__: FullClient())
    settings = KafkaSettings(servers=("h:1",), send_timeout_ms=300)
    producer = KafkaProducer(settings, Metrics(), batch_bytes=1000)
    loop = asyncio.get_running_loop()
    waited: list[float] = []

    def send() -> asyncio.Future[Acknowledged]:
        reported: asyncio.Future[Acknowledged] = loop.create_future()
        sent = loop.time()

        def on_sent(result: Acknowledged | TidebookError) -> None:
            assert isinstance(result, Unavailable)
            waited.append(loop.time() - sent)
            reported.set_result(None)  # type: ignore[arg-type]

        producer.send(Outgoing("t", 0, b"k", b"v"), on_sent)
        return reported

    first = send()
    loop.call_later(0.2, lambda: second.append(send()))
    second: list[asyncio.Future[Acknowledged]] = []
    await first
    await second[0]
    await producer.close()
    assert min(waited) >= 0.29


class Failing:
    """A consumer that returns one error, and nothing after it."""

    def __init__(self, code: int) -> None:
        self._left = [code]

    def error(self) -> KafkaError:
        return KafkaError(self._code)

    def offset(self) -> int:
        return 0

    def list_topics(self, *_: Any, **__: Any) -> None: ...

    def assign(self, *_: Any) -> None: ...

    def consume(self, *_: Any) -> list[Any]:
        return []

    def poll(self, _: float) -> Any:
        if not self._left:
            time.sleep(0.05)
            return None
        self._code = self._left.pop()
        return self


@pytest.mark.parametrize(
    ("code", "kind", "reported"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, Unavailable, "ACLs"),
        (KafkaError._BAD_MSG, Corrupt, "damaged"),
    ],
)
def test_a_permanent_consumer_error_is_raised_at_once_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception], reported: str
) -> None:
    monkeypatch.setattr(reading, "new_consumer", lambda *_, **__: Failing(code))
    reader = SliceReader(KafkaSettings(servers=("h:1",), request_timeout_ms=1000), Metrics())
    began = time.monotonic()
    with pytest.raises(kind, match=reported):
        reader.read(LogSlice("t", 0, 0, 5, None, 10, 10**6))
    assert time.monotonic() - began < 0.9


async def test_a_request_after_closing_does_not_connect_again() -> None:
    topics = Topics(KafkaSettings(servers=("h:1",)))
    await topics.close()
    with pytest.raises(Unavailable, match="closed"):
        await topics.find("t")
