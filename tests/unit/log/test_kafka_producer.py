"""Batches through the producer, with a client that rejects what a real one rarely does."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka import producer as producing
from tidebook.log.kafka.producer import KafkaProducer
from tidebook.log.port import Acknowledged, RecordColumns
from tidebook.runtime.metrics import Metrics

TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)


class Report(Message):
    def __init__(self, key: bytes, value: bytes, offset: int) -> None:
        super().__init__("t", 0, offset, key, value, timestamp=(1, 1000))


class Client:
    """Accepts records unless the next one is to be rejected, and acknowledges them at the next poll."""

    def __init__(self, *refusals: KafkaError | Exception | None) -> None:
        self._refusals = deque(refusals)
        self._taken: deque[tuple[Any, Report]] = deque()
        self._offset = 0
        self.in_flight_most = 0
        self.values: list[bytes] = []

    def produce(self, _: str, value: bytes, key: bytes, __: int, on_delivery: Any) -> None:
        refused = self._refusals.popleft() if self._refusals else None
        if refused is not None:
            raise KafkaException(refused) if isinstance(refused, KafkaError) else refused
        self._taken.append((on_delivery, Report(key, value, self._offset)))
        self.values.append(value)
        self._offset += 1
        self.in_flight_most = max(self.in_flight_most, len(self._taken))

    def poll(self, timeout_s: float) -> int:
        if not self._taken:
            time.sleep(min(timeout_s, 0.002))
        while self._taken:
            on_delivery, report = self._taken.popleft()
            on_delivery(None, report)
        return 0

    def purge(self, *_: Any, **__: Any) -> None: ...

    def flush(self, *_: Any) -> None: ...

    def __len__(self) -> int:
        return len(self._taken)


class Outcomes:
    """The results of a producer with these clients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *clients: Client, **settings: Any) -> None:
        left = deque(clients)
        monkeypatch.setattr(producing, "connect", lambda *_, **__: left.popleft())
        self.metrics = Metrics()
        self.producer = KafkaProducer(KafkaSettings(servers=("h:1",), **settings), self.metrics, batch_bytes=1000)

    async def send(self, *values: bytes) -> list[Acknowledged | TidebookError]:
        reported: dict[int, Acknowledged | TidebookError] = {}
        all_reported = asyncio.Event()

        def on_sent(places: Sequence[int], results: Sequence[Acknowledged | TidebookError]) -> None:
            reported.update(zip(places, results, strict=True))
            if len(reported) == len(values):
                all_reported.set()

        self.producer.send_many(RecordColumns("t", [0] * len(values), [b"k"] * len(values), list(values)), on_sent)
        async with asyncio.timeout(10):
            await all_reported.wait()
        return [reported[place] for place in range(len(values))]

    async def close(self) -> None:
        """Every record has a result, and none is counted as in flight."""
        assert self.producer.in_flight == 0
        await self.producer.close()


async def test_one_record_of_a_batch_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = Outcomes(monkeypatch, Client(None, TOO_LARGE))
    first, second, third = await outcomes.send(b"a", b"b", b"c")
    assert [first, third] == [Acknowledged(0, 0, 1000), Acknowledged(0, 1, 1000)]
    assert isinstance(second, TooLarge)
    await outcomes.close()


async def test_all_records_of_a_batch_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = Outcomes(monkeypatch, Client(TOO_LARGE, TOO_LARGE))
    assert [type(each) for each in await outcomes.send(b"a", b"b")] == [TooLarge, TooLarge]
    assert await outcomes.send(b"c") == [Acknowledged(0, 0, 1000)]
    await outcomes.close()


async def test_acknowledgements_that_cannot_be_read_are_unknown_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: Message) -> tuple[int, int]:
        raise SystemError("from within the client")

    monkeypatch.setattr(Report, "timestamp", unreadable)
    outcomes = Outcomes(monkeypatch, Client())
    assert [type(each) for each in await outcomes.send(b"a", b"b")] == [OutcomeUnknown, OutcomeUnknown]
    await outcomes.close()


async def test_a_client_with_a_fatal_error_is_replaced_and_the_next_gets_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = Outcomes(monkeypatch, Client(KafkaError(KafkaError._FATAL)), Client())
    assert await outcomes.send(b"a", b"b") == [Acknowledged(0, 0, 1000), Acknowledged(0, 1, 1000)]
    assert outcomes.metrics.counted("kafka_producer_replaced") == 1
    await outcomes.close()


async def test_a_batch_that_a_full_client_never_accepts_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(*[BufferError()] * 1000)
    outcomes = Outcomes(monkeypatch, client, send_timeout_ms=50)
    assert [type(each) for each in await outcomes.send(b"a", b"b")] == [Unavailable, Unavailable]
    client._refusals.clear()
    assert await outcomes.send(b"c") == [Acknowledged(0, 0, 1000)]
    await outcomes.close()


async def test_a_client_that_fails_within_a_batch_is_replaced_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = Outcomes(monkeypatch, Client(None, KafkaError(KafkaError._FATAL)), Client())
    assert await outcomes.send(b"a", b"b", b"c") == [
        Acknowledged(0, 0, 1000),
        Acknowledged(0, 0, 1000),
        Acknowledged(0, 1, 1000),
    ]
    await outcomes.close()


@pytest.mark.parametrize("refusal", [KafkaError(KafkaError._INVALID_ARG), TypeError("not bytes"), ValueError("no")])
async def test_a_record_that_the_client_cannot_encode_is_invalid_input(
    monkeypatch: pytest.MonkeyPatch, refusal: KafkaError | Exception
) -> None:
    outcomes = Outcomes(monkeypatch, Client(refusal, refusal))
    assert [type(each) for each in await outcomes.send(b"a", b"b")] == [InvalidInput, InvalidInput]
    assert await outcomes.send(b"c") == [Acknowledged(0, 0, 1000)]
    await outcomes.close()


async def test_a_full_client_gets_the_rest_of_a_batch_when_it_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = Outcomes(monkeypatch, client := Client(None, BufferError(), BufferError()))
    assert await outcomes.send(b"a", b"b", b"c") == [Acknowledged(0, n, 1000) for n in range(3)]
    assert client.values == [b"a", b"b", b"c"]
    await outcomes.close()


async def test_of_a_partly_accepted_batch_only_the_rest_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = Outcomes(monkeypatch, Client(None, *[BufferError()] * 1000), send_timeout_ms=50)
    first, *rest = await outcomes.send(b"a", b"b", b"c")
    assert first == Acknowledged(0, 0, 1000)
    assert [type(each) for each in rest] == [Unavailable, Unavailable]
    assert outcomes.metrics.counted("kafka_send_failed", error="Unavailable") == 2
    await outcomes.close()


class Bounded(Client):
    """Takes four records, and no more until it is polled."""

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, on_delivery: Any) -> None:
        if len(self._taken) == 4:
            raise BufferError
        super().produce(topic, value, key, partition, on_delivery)


async def test_batches_keep_their_order_through_a_client_that_has_no_room_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Bounded()
    outcomes = Outcomes(monkeypatch, client)
    values = [[b"%d-%d" % (batch, n) for n in range(3)] for batch in range(10)]
    reported = await asyncio.gather(*(outcomes.send(*batch) for batch in values))
    assert [each for batch in reported for each in batch] == [Acknowledged(0, n, 1000) for n in range(30)]
    assert client.values == [value for batch in values for value in batch]
    assert client.in_flight_most == 4
    await outcomes.close()
