"""An out-of-range event of a consumer is compared with fresh watermarks before it is believed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from tidebook.core.errors import LogLost, Unavailable
from tidebook.kafka.errors import OUT_OF_RANGE
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka import consumer_pool as reading
from tidebook.log.kafka.consumer_pool import EndsEarly, LogSlice, SliceReader
from tidebook.runtime.metrics import Metrics


class ScriptedMessage:
    """A record or, with `code`, an event of the consumer."""

    def __init__(self, offset: int, code: int | None = None, *, partition: int = 0) -> None:
        self._offset, self._code, self._partition = offset, code, partition

    def error(self) -> KafkaError | None:
        return None if self._code is None else KafkaError(self._code)

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"%d" % self._offset

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


class ScriptedConsumer:
    """A consumer of a log from `low` to `high`; scripted messages come before the records at its position."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.scripted: deque[ScriptedMessage] = deque()
        self.assigned: list[int] = []
        #: The position from which it fetches; None if it does not fetch.
        self.position: int | None = None
        #: Whether every assignment is answered with an out-of-range event, as by a broker that contradicts itself.
        self.contradicts = False

    def list_topics(self, topic: str, timeout: float) -> None:
        pass

    def assign(self, places: list[TopicPartition]) -> None:
        self.position = places[0].offset
        self.assigned.append(places[0].offset)
        if self.contradicts:
            self.scripted.append(ScriptedMessage(self.position, KafkaError._AUTO_OFFSET_RESET))

    def unassign(self) -> None:
        self.position = None

    def get_watermark_offsets(self, place: Any, timeout: float = 0, cached: bool = False) -> tuple[int, int]:
        return self.low, self.high

    def poll(self, timeout: float) -> ScriptedMessage | None:
        if self.scripted:
            message = self.scripted.popleft()
            if message.error() is not None and message.error().code() in OUT_OF_RANGE:  # type: ignore[union-attr]
                self.position = None  # librdkafka stops fetching there
            return message
        if self.position is None:
            return None
        if self.position >= self.high:
            return ScriptedMessage(self.high, KafkaError._PARTITION_EOF)
        self.position += 1
        return ScriptedMessage(self.position - 1)

    def consume(self, count: int, timeout: float) -> list[ScriptedMessage]:
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def open_reader(monkeypatch: pytest.MonkeyPatch) -> Callable[[ScriptedConsumer], SliceReader]:
    def open_reader(consumer: ScriptedConsumer) -> SliceReader:
        monkeypatch.setattr(reading, "new_consumer", lambda *_, **__: consumer)
        return SliceReader(KafkaSettings(servers=("h:1",), request_timeout_ms=1000), Metrics())

    return open_reader


def slice_of(start: int, stop: int) -> LogSlice:
    return LogSlice("t", 0, start, stop, None, 1000, 10**6)


@pytest.mark.parametrize("code", sorted(OUT_OF_RANGE))
@pytest.mark.parametrize("start", [3899, 3936, 3940], ids=["the log's start", "within", "near the end"])
def test_an_out_of_range_event_of_a_former_position_is_no_loss(
    open_reader: Callable[[ScriptedConsumer], SliceReader], code: int, start: int
) -> None:
    consumer = ScriptedConsumer(3899, 3950)
    reader = open_reader(consumer)
    consumer.scripted.append(ScriptedMessage(3800, code))
    batch = reader.read(slice_of(start, 3950))
    assert [record.offset for record in batch.records] == list(range(start, 3950))
    assert batch.next_offset == 3950
    assert consumer.assigned == [start, start]


def test_a_page_continues_after_an_out_of_range_event_and_returns_each_record_once(
    open_reader: Callable[[ScriptedConsumer], SliceReader],
) -> None:
    consumer = ScriptedConsumer(0, 20)
    reader = open_reader(consumer)
    former = [ScriptedMessage(offset) for offset in range(5, 8)]
    consumer.scripted.extend([*former, ScriptedMessage(2, KafkaError._AUTO_OFFSET_RESET), ScriptedMessage(8)])
    consumer.consume = lambda count, timeout: [  # type: ignore[method-assign]
        consumer.scripted.popleft() for _ in range(min(count, len(consumer.scripted)))
    ]
    batch = reader.read(slice_of(5, 20))
    assert [record.offset for record in batch.records] == list(range(5, 20))
    assert consumer.assigned == [5, 8]


def test_a_position_below_the_start_is_a_loss(open_reader: Callable[[ScriptedConsumer], SliceReader]) -> None:
    consumer = ScriptedConsumer(10, 30)
    consumer.scripted.append(ScriptedMessage(5, KafkaError.OFFSET_OUT_OF_RANGE))
    with pytest.raises(LogLost) as caught:
        open_reader(consumer).read(slice_of(5, 40))
    assert (caught.value.first, caught.value.last) == (5, 9)


def test_a_position_after_the_end_that_a_broker_reports_is_not_yet_a_loss(
    open_reader: Callable[[ScriptedConsumer], SliceReader],
) -> None:
    consumer = ScriptedConsumer(10, 30)
    consumer.scripted.append(ScriptedMessage(31, KafkaError.OFFSET_OUT_OF_RANGE))
    with pytest.raises(EndsEarly) as caught:
        open_reader(consumer).read(slice_of(31, 40))
    assert (caught.value.offset, caught.value.end) == (31, 30)


def test_a_broker_that_contradicts_itself_is_unavailable_within_the_timeout(
    open_reader: Callable[[ScriptedConsumer], SliceReader],
) -> None:
    consumer = ScriptedConsumer(0, 20)
    consumer.contradicts = True
    with pytest.raises(Unavailable, match="out of range"):
        open_reader(consumer).read(slice_of(5, 20))


def test_the_end_of_another_partition_does_not_end_the_page(
    open_reader: Callable[[ScriptedConsumer], SliceReader],
) -> None:
    consumer = ScriptedConsumer(0, 20)
    consumer.scripted.append(ScriptedMessage(99, KafkaError._PARTITION_EOF, partition=1))
    batch = open_reader(consumer).read(slice_of(5, 20))
    assert [record.offset for record in batch.records] == list(range(5, 20))
