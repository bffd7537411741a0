"""One consumer that reads slices of partitions. Lives in one thread of its own; keeps its place between pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from tidebook.core.errors import Corrupt, LogLost, Unavailable
from tidebook.core.metrics import Metrics
from tidebook.log.kafka.client import new_consumer
from tidebook.log.kafka.faults import DAMAGED, OUT_OF_RANGE, REFUSED, UNKNOWN_TOPIC, failed
from tidebook.log.kafka.settings import KafkaSettings
from tidebook.log.port import Batch, Record

#: A consumer that reads what is there never waits for more; it only bounds how soon it can be placed elsewhere.
_FETCH_WAIT_MS = 1
#: Larger ones are slower.
_CONSUME_RECORDS_MAX = 1000
#: A read by key that has passed over so many records of others returns what it has.
PASSED_RECORDS_MAX = 50_000
_POLL_S = 1.0

#: A `confluent_kafka.Message`; its stubs call everything optional, which only events are.
Message = Any


class Slice:
    """What one read asks for."""

    __slots__ = ("key", "limit", "limit_bytes", "partition", "start", "stop", "topic")

    def __init__(
        self, topic: str, partition: int, start: int, stop: int, key: bytes | None, limit: int, limit_bytes: int
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.start = start
        self.stop = stop
        self.key = key
        self.limit = limit
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} from {self.start}"


class SliceReader:
    """A consumer and its place: which partition, which offset comes next."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        began = time.perf_counter()
        self._metrics = metrics
        self._timeout_s = settings.request_timeout_ms / 1000
        self._client = new_consumer(settings, fetch_wait_ms=_FETCH_WAIT_MS)
        #: The partition it stands in, if any.
        self.place: tuple[str, int] | None = None
        self.next_offset = -1
        self._known: set[str] = set()
        #: Taken from the client, and not yet asked for.
        self._ahead: Sequence[Message] = ()
        metrics.count("kafka_consumer_opened", kind="read")
        metrics.time("kafka_consumer_init", time.perf_counter() - began)

    def read(self, wanted: Slice) -> Batch:
        """The slice's next page. `stop` must not lie behind the partition's end."""
        self._stand_at(wanted)
        try:
            page = _Page(wanted)
            deadline = time.monotonic() + self._timeout_s
            while not page.full:
                messages = self._ahead or self._poll(page, deadline)
                if not messages:
                    break
                taken = page.take(messages)
                self._ahead = messages[taken:]
                if taken < len(messages) and (error := messages[taken].error()) is not None:
                    self._ahead = messages[taken + 1 :]
                    if self._ends(error, page, messages[taken].offset()):
                        break
            self.next_offset = page.next_offset
        except BaseException:
            self.place = None  # wherever it stands now, nobody may go on from there
            raise
        # Who asks for a single record looks and does not read on: fetching what follows would only cost.
        if wanted.limit == 1 or (not self._ahead and self._caught_up()):
            self.rest()
        return Batch(tuple(page.records), page.next_offset)

    def rest(self) -> None:
        """Stop fetching; the next read places it anew."""
        if self.place is not None:
            self._client.unassign()
            self.place, self._ahead = None, ()

    def close(self) -> None:
        """Let go of the client."""
        self._client.close()

    def _stand_at(self, wanted: Slice) -> None:
        if self.place == (wanted.topic, wanted.partition) and self.next_offset == wanted.start:
            return
        began = time.perf_counter()
        self._ahead = ()
        try:
            if self.place is not None:
                self._client.unassign()
            if wanted.topic not in self._known:
                # A client learns of a further topic's leader only once a second, unless it is asked for.
                self._client.list_topics(wanted.topic, timeout=self._timeout_s)
                self._known.add(wanted.topic)
            self._client.assign([TopicPartition(wanted.topic, wanted.partition, wanted.start)])
        except KafkaException as error:
            self.place = None
            raise failed(error, f"reading {wanted}") from error
        self.place, self.next_offset = (wanted.topic, wanted.partition), wanted.start
        self._metrics.time("kafka_consumer_seek", time.perf_counter() - began)

    def _poll(self, page: _Page, deadline: float) -> Sequence[Message]:
        """What the client has; where it has nothing, the first thing that comes. Empty: the page is as it is."""
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
                if page.moved:
                    return ()
                raise Unavailable(
                    f"reading {page.wanted}: Kafka sent nothing for {self._timeout_s:g} s: try again later"
                )

    def _ends(self, error: KafkaError, page: _Page, at: int) -> bool:
        """Whether an event in the stream ends the page; a real error is raised."""
        wanted = page.wanted
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            if at >= wanted.stop:  # holes up to stop
                page.next_offset = wanted.stop
                return True
            low, high = self._watermarks(wanted)
            return high <= page.next_offset
        if code in OUT_OF_RANGE:
            low, high = self._watermarks(wanted)
            raise lost(wanted.topic, wanted.partition, page.next_offset, low, high)
        if code in UNKNOWN_TOPIC or code in REFUSED:
            raise failed(error, f"reading {wanted}")
        if code in DAMAGED:
            raise Corrupt(
                f"reading {wanted}: Kafka sent a batch at offset {page.next_offset} that is damaged ({error.str()}): "
                "nothing behind it can be read until the broker has it whole"
            )
        return False  # a connection that comes back, or the deadline

    def _watermarks(self, wanted: Slice) -> tuple[int, int]:
        found: tuple[int, int] | None
        try:
            found = self._client.get_watermark_offsets(
                TopicPartition(wanted.topic, wanted.partition), timeout=self._timeout_s
            )
        except KafkaException as error:
            raise failed(error, f"reading {wanted}") from error
        if found is None:
            raise Unavailable(f"reading {wanted}: Kafka did not tell the log's start in time")
        return found

    def _caught_up(self) -> bool:
        assert self.place is not None
        found: tuple[int, int] | None = self._client.get_watermark_offsets(TopicPartition(*self.place), cached=True)
        return found is None or found[1] <= self.next_offset


class _Page:
    """Records as they are gathered."""

    __slots__ = ("_bytes", "_passed", "full", "next_offset", "records", "wanted")

    def __init__(self, wanted: Slice) -> None:
        self.wanted = wanted
        self.records: list[Record] = []
        self.next_offset = wanted.start
        self.full = False
        self._bytes = 0
        self._passed = 0

    @property
    def room(self) -> int:
        """How many messages may still be of use."""
        left = self.wanted.stop - self.next_offset
        return left if self.wanted.key is not None else min(left, self.wanted.limit - len(self.records))

    @property
    def moved(self) -> bool:
        return self.next_offset > self.wanted.start

    def take(self, messages: Sequence[Message]) -> int:
        """Take messages until the page is full, or one of them is an event; how many were taken."""
        wanted, records = self.wanted, self.records
        key, stop, limit, limit_bytes = wanted.key, wanted.stop, wanted.limit, wanted.limit_bytes
        held, next_offset = self._bytes, self.next_offset
        taken = 0
        for message in messages:
            if message.error() is not None:
                break
            offset = message.offset()
            if offset >= stop:
                next_offset = stop
                break
            message_key = message.key()
            if key is None or message_key == key:
                value = message.value()
                size = len(value) if value is not None else 0
                if len(records) >= limit or (records and held + size > limit_bytes):
                    self.full = True
                    break
                held += size
                headers = message.headers()
                records.append(
                    Record(
                        offset,
                        message.timestamp()[1],
                        message_key,
                        value,
                        _headers(headers) if headers else (),
                    )
                )
            taken += 1
            next_offset = offset + 1
        self._bytes, self.next_offset = held, next_offset
        self._passed += taken
        if next_offset >= stop or len(records) >= limit or self._passed >= PASSED_RECORDS_MAX:
            self.full = True
        return taken


def _headers(headers: Sequence[tuple[str, bytes | None]]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, value if value is not None else b"") for name, value in headers)


def record_of(message: Message) -> Record:
    """A message that is no event, as a record."""
    headers = message.headers()
    return Record(
        message.offset(), message.timestamp()[1], message.key(), message.value(), _headers(headers) if headers else ()
    )


def lost(topic: str, partition: int, wanted: int, low: int, high: int) -> LogLost:
    """An offset outside of what the log holds: below its start, or behind its end."""
    if wanted < low:
        return LogLost(
            topic=topic,
            partition=partition,
            first=wanted,
            last=low - 1,
            remedy="keep records longer than replication may take",
        )
    return LogLost(
        topic=topic,
        partition=partition,
        first=high,
        last=wanted - 1,
        remedy="the log ends before what was read of it: its topic was made again, or lost acknowledged records",
    )
