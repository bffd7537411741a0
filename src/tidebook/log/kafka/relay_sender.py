"""Sending to Kafka at once, past the outbox: the backends `kafka` and `kafka_async`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer

from tidebook.core.errors import OutcomeUnknown, TidebookError
from tidebook.core.metrics import Metrics
from tidebook.log.kafka.client import common_config
from tidebook.log.kafka.faults import not_acknowledged, not_sent
from tidebook.log.kafka.relay_channel import ANY_PARTITION
from tidebook.log.kafka.relay_partition import partition_of
from tidebook.log.kafka.settings import KafkaSettings

LOGGER = logging.getLogger("tidebook.outbox")
POLL_S = 0.1
MESSAGE_BYTES_MAX = 1_000_000_000


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


class KafkaSender:
    """One idempotent producer for all threads of a process."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._producer = Producer(
            common_config(settings)
            | {
                "enable.idempotence": True,
                "acks": "all",
                "partitioner": "murmur2_random",
                "compression.type": settings.compression,
                "message.timeout.ms": settings.send_timeout_ms,
                "message.max.bytes": MESSAGE_BYTES_MAX,
                "linger.ms": settings.linger_ms,
            }
        )
        self._metrics = metrics
        self._timeout_s = settings.send_timeout_ms / 1000
        self._partitions: dict[str, int] = {}

    def send(self, messages: Sequence[Sendable], *, wait: bool) -> None:
        """Send in order. With `wait`, the first failure is raised once every outcome is known."""
        if not wait:
            for message in messages:
                self._produce(message, self._told)
            self._producer.poll(0)
            return
        left = threading.Semaphore(0)
        failures: list[TidebookError] = []
        for message in messages:
            self._produce(message, partial(_acknowledged, left, failures))
        for _ in messages:
            while not left.acquire(blocking=False):
                self._producer.poll(POLL_S)
        if failures:
            raise failures[0]

    def _produce(self, message: Sendable, on_delivery: Any) -> None:
        chosen, count = message.partition_key, self._count(message.topic)
        partition = ANY_PARTITION if chosen is None else partition_of(chosen, count)
        while True:
            try:
                self._producer.produce(
                    message.topic,
                    message.payload,
                    message.key,
                    partition,
                    on_delivery=on_delivery,
                    headers=list(message.headers),
                )
                return
            except BufferError:
                self._producer.poll(POLL_S)
            except KafkaException as error:
                raise not_sent(error, message.topic, partition) from error

    def _count(self, topic: str) -> int:
        """How many partitions a topic has; asked for once, so that a missing topic is told before anything is sent."""
        count = self._partitions.get(topic)
        if count is None:
            try:
                found = self._producer.list_topics(topic, timeout=self._timeout_s).topics[topic]
            except KafkaException as error:
                raise not_sent(error, topic, ANY_PARTITION) from error
            if found.error is not None:
                raise not_sent(found.error, topic, ANY_PARTITION)
            self._partitions[topic] = count = len(found.partitions)
        return count

    def _told(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            LOGGER.error("outbox: kafka_async: %s", _failure(error, message))
            self._metrics.count("outbox_kafka_async_failures", topic=message.topic())

    def close(self) -> None:
        """Send what is in the queue."""
        self._producer.flush(self._timeout_s)


def _acknowledged(
    left: threading.Semaphore, failures: list[TidebookError], error: KafkaError | None, message: Any
) -> None:
    if error is not None:
        failures.append(_failure(error, message))
    left.release()


def _failure(error: KafkaError, message: Any) -> TidebookError:
    told = not_acknowledged(error, message.topic(), message.partition())
    if isinstance(told, OutcomeUnknown):
        return OutcomeUnknown(
            f"topic {message.topic()!r}: Kafka did not acknowledge a message ({error.str()}): it may be there; "
            "the backend 'db' would tell, and send it once",
            partition=message.partition(),
        )
    return told
