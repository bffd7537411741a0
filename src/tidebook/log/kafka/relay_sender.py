"""Sending to Kafka at once, past the outbox: the backends `kafka` and `kafka_async`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.metrics import Metrics
from tidebook.log.kafka.client import common_config
from tidebook.log.kafka.faults import TOO_LARGE, UNKNOWN_TOPIC, kafka_error, not_acknowledged, not_sent
from tidebook.log.kafka.relay_channel import ANY_PARTITION, MESSAGE_BYTES_MAX
from tidebook.log.kafka.relay_partition import partition_of
from tidebook.log.kafka.relay_producer import RelayProducer, fatal_cause
from tidebook.log.kafka.settings import KafkaSettings

LOGGER = logging.getLogger("tidebook.outbox")
POLL_S = 0.1
#: What the client may take to report, past the time that it gives a message.
REPORT_S_MAX = 5.0
#: How long a topic's number of partitions is gone by, as Kafka's own clients do; and what a later look at it may take.
COUNT_S_MAX = 300.0
LOOK_S_MAX = 1.0


class Sendable(Protocol):
    """A message, whoever made it."""

    @property
    def topic(self) -> str: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def partition_key(self) -> bytes | None: ...
    @property
    def payload(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]: ...


#: What became of a message. Callbacks only keep it: they may run with a fatal error of the producer on its way out,
#: when a lock that they took (a logger's, say) would never be let go of.
Report = tuple[KafkaError | None, Any]


class KafkaSender:
    """One idempotent producer for all threads of a process."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._config = common_config(settings) | {
            "enable.idempotence": True,
            "acks": "all",
            "partitioner": "murmur2_random",
            "compression.type": settings.compression,
            "message.timeout.ms": settings.send_timeout_ms,
            "message.max.bytes": MESSAGE_BYTES_MAX,
            "linger.ms": settings.linger_ms,
        }
        self._producer = RelayProducer(self._config)
        self._replacing = threading.Lock()
        self._metrics = metrics
        self._timeout_s = settings.send_timeout_ms / 1000
        #: How many partitions a topic has, and when that was asked.
        self._counts: dict[str, tuple[int, float]] = {}
        self._untold: deque[Report] = deque()

    def send(self, messages: Sequence[Sendable], *, wait: bool) -> None:
        """Send in order. With `wait`, the first failure is raised once every outcome is known."""
        for topic in dict.fromkeys(message.topic for message in messages):
            self._count(topic)
        producer = self._producer
        reports: list[Report] = []
        on_delivery = partial(_keep, reports if wait else self._untold)
        for message in messages:
            self._produce(producer, message, on_delivery)
        self._serve(producer, 0)
        if not wait:
            return
        # A message that is not acknowledged in time is reported then; this only bounds a client that reports nothing.
        deadline = time.monotonic() + self._timeout_s + REPORT_S_MAX
        while len(reports) < len(messages):
            if time.monotonic() > deadline:
                raise OutcomeUnknown(f"Kafka's client did not tell what became of {len(messages)} messages in time")
            self._serve(producer, POLL_S)
        for error, told in reports:
            if error is not None:
                raise self._failed(error, told)

    def _serve(self, producer: RelayProducer, timeout_s: float) -> None:
        """Deliver reports; a producer that has failed for good has told of all it had, and is replaced."""
        try:
            producer.poll(timeout_s)
        except (KafkaException, SystemError) as error:
            LOGGER.error("outbox: the producer failed and is made anew: %s", fatal_cause(error, producer).str())
            self._replace(producer)
        self._tell()

    def _replace(self, failed: RelayProducer) -> None:
        with self._replacing:
            if self._producer is not failed:
                return
            self._producer = RelayProducer(self._config)
        with suppress(KafkaException, SystemError):
            failed.flush(REPORT_S_MAX)  # it sends nothing more, and reports all it had

    def _produce(self, producer: RelayProducer, message: Sendable, on_delivery: Any) -> None:
        chosen, count = message.partition_key, self._count(message.topic)
        partition = ANY_PARTITION if chosen is None else partition_of(chosen, count)
        while True:
            try:
                producer.produce(
                    message.topic,
                    message.payload,
                    message.key,
                    partition,
                    on_delivery=on_delivery,
                    headers=list(message.headers),
                )
                return
            except BufferError:
                self._serve(producer, POLL_S)
            except KafkaException as error:
                if kafka_error(error).code() == KafkaError._FATAL:
                    self._replace(producer)
                self._forget_if_gone(kafka_error(error), message.topic)
                raise not_sent(error, message.topic, partition) from error

    def _count(self, topic: str) -> int:
        """How many partitions a topic has; asked for first, so that a missing topic is told before anything is sent."""
        known = self._counts.get(topic)
        now = time.monotonic()
        if known is not None and now - known[1] < COUNT_S_MAX:
            return known[0]
        try:
            count = self._look(topic, self._timeout_s if known is None else LOOK_S_MAX)
        except TidebookError:
            if known is None:
                raise
            count = known[0]  # whoever is away now may be back before the message's own time is over
        self._counts[topic] = (count, now)
        return count

    def _look(self, topic: str, timeout_s: float) -> int:
        try:
            found = self._producer.list_topics(topic, timeout=timeout_s).topics[topic]
        except KafkaException as error:
            raise not_sent(error, topic, ANY_PARTITION) from error
        if found.error is not None:
            raise not_sent(found.error, topic, ANY_PARTITION)
        return len(found.partitions)

    def _forget_if_gone(self, error: KafkaError, topic: str) -> None:
        """A topic that was made again with fewer partitions would else be missed for ever."""
        if error.code() in UNKNOWN_TOPIC:
            self._counts.pop(topic, None)

    def _failed(self, error: KafkaError, message: Any) -> TidebookError:
        self._forget_if_gone(error, message.topic())
        return _failure(error, message)

    def _tell(self) -> None:
        """Say what the client says, and which messages of `kafka_async` failed."""
        self._producer.tell()
        while self._untold:
            error, message = self._untold.popleft()
            if error is not None:
                LOGGER.error("outbox: kafka_async: %s", self._failed(error, message))
                self._metrics.count("outbox_kafka_async_failures", topic=message.topic())

    def close(self) -> None:
        """Send what is in the queue."""
        deadline = time.monotonic() + self._timeout_s
        while len(self._producer) and time.monotonic() < deadline:
            self._serve(self._producer, POLL_S)
        self._tell()


def _keep(reports: list[Report] | deque[Report], error: KafkaError | None, message: Any) -> None:
    reports.append((error, message))


def _failure(error: KafkaError, message: Any) -> TidebookError:
    if error.code() in TOO_LARGE:
        return InvalidInput(
            f"topic {message.topic()!r}: Kafka refused a message of {len(message):,} bytes, or the batch that it went "
            f"in ({error.str()}): it is in no log; raise the topic's max.message.bytes, or send less at once"
        )
    told = not_acknowledged(error, message.topic(), message.partition())
    if isinstance(told, OutcomeUnknown):
        return OutcomeUnknown(
            f"topic {message.topic()!r}: Kafka did not acknowledge a message ({error.str()}): it may be there; "
            "the backend 'db' would tell, and send it once",
            partition=message.partition(),
        )
    return told
