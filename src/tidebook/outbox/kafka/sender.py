"""Send to Kafka without the outbox: the backends `kafka` and `kafka_async`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.kafka.client import common_config
from tidebook.kafka.errors import TOO_LARGE, UNKNOWN_TOPIC, kafka_error, not_acknowledged, not_sent
from tidebook.kafka.settings import KafkaSettings
from tidebook.outbox.kafka.producer import (
    ANY_PARTITION,
    MESSAGE_BYTES_MAX,
    RelayProducer,
    choose_partition,
    fatal_cause,
)
from tidebook.outbox.kafka.scan import refuse_journal_topic
from tidebook.outbox.message import Message
from tidebook.runtime.metrics import Metrics

LOGGER = logging.getLogger("tidebook.outbox")
POLL_S = 0.1
#: How long the client may take to report, after a message's timeout.
REPORT_S_MAX = 5.0
#: How long a topic's number of partitions is cached, as Kafka's clients do, and the timeout of a refresh.
PARTITION_COUNT_TTL_S = 300.0
REFRESH_S_MAX = 1.0
#: A delivery report. Callbacks only store it: they may run while a fatal error of the producer is propagating, when a
#: lock that they take (a logger's, for example) is never released.
Report = tuple[KafkaError | None, Any]


class KafkaSender:
    """One idempotent producer, shared by all threads of a process."""

    def __init__(self, settings: KafkaSettings, metrics: Metrics) -> None:
        self._client = common_config(settings)
        self._config = self._client | {
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
        #: A topic's number of partitions, and when it was fetched.
        self._partition_counts: dict[str, tuple[int, float]] = {}
        self._async_reports: deque[Report] = deque()

    def send(self, messages: Sequence[Message], *, wait: bool) -> None:
        """Send the messages in order. With `wait`, raise the first failure once every outcome is known."""
        for topic in dict.fromkeys(message.topic for message in messages):
            self._partition_count(topic)
        producer = self._producer
        reports: list[Report] = []
        store = reports if wait else self._async_reports

        def on_delivery(error: KafkaError | None, message: Any) -> None:
            store.append((error, message))

        for message in messages:
            self._produce(producer, message, on_delivery)
        self._serve(producer, 0)
        if not wait:
            return
        # The client reports a message that is not acknowledged in time; this only bounds one that reports nothing.
        deadline = time.monotonic() + self._timeout_s + REPORT_S_MAX
        while len(reports) < len(messages):
            if time.monotonic() > deadline:
                raise OutcomeUnknown(f"Kafka's client did not report the outcome of {len(messages)} messages in time")
            self._serve(producer, POLL_S)
        for error, message in reports:
            if error is not None:
                raise self._delivery_error(error, message)

    def _serve(self, producer: RelayProducer, timeout_s: float) -> None:
        """Serve delivery reports; replace a producer that failed fatally, which has reported all its messages."""
        try:
            producer.poll(timeout_s)
        except (KafkaException, SystemError) as error:
            LOGGER.error("outbox: the producer failed and is replaced: %s", fatal_cause(error, producer).str())
            self._replace(producer)
        self._log_async_failures()

    def _replace(self, failed: RelayProducer) -> None:
        with self._replacing:
            if self._producer is not failed:
                return
            self._producer = RelayProducer(self._config)
        with suppress(KafkaException, SystemError):
            failed.flush(REPORT_S_MAX)  # a failed producer sends nothing more, and reports every message it had

    def _produce(self, producer: RelayProducer, message: Message, on_delivery: Any) -> None:
        partition = choose_partition(message.partition_key, self._partition_count(message.topic))
        while True:
            try:
                headers: list[tuple[str, str | bytes | None]] = list(message.headers)
                producer.produce(message.topic, message.payload, message.key, partition, on_delivery, headers=headers)
                return
            except BufferError:
                self._serve(producer, POLL_S)
            except KafkaException as error:
                if kafka_error(error).code() == KafkaError._FATAL:
                    self._replace(producer)
                self._forget_if_missing(kafka_error(error), message.topic)
                raise not_sent(error, message.topic, partition) from error

    def _partition_count(self, topic: str) -> int:
        """Return the topic's number of partitions; called first, so that a missing topic is reported before sending."""
        known = self._partition_counts.get(topic)
        now = time.monotonic()
        if known is not None and now - known[1] < PARTITION_COUNT_TTL_S:
            return known[0]
        try:
            count = self._fetch_partition_count(topic, self._timeout_s if known is None else REFRESH_S_MAX)
            if known is None:
                refuse_journal_topic(self._client, topic, count)
        except TidebookError:
            if known is None:
                raise
            count = known[0]  # Kafka may be available again before the message's timeout
        self._partition_counts[topic] = (count, now)
        return count

    def _fetch_partition_count(self, topic: str, timeout_s: float) -> int:
        try:
            found = self._producer.list_topics(topic, timeout=timeout_s).topics[topic]
            if found.error is not None:
                raise KafkaException(found.error)
        except KafkaException as error:
            raise not_sent(error, topic, ANY_PARTITION) from error
        return len(found.partitions)

    def _forget_if_missing(self, error: KafkaError, topic: str) -> None:
        """Drop the cached partition count of a missing topic: it may be created again with fewer partitions."""
        if error.code() in UNKNOWN_TOPIC:
            self._partition_counts.pop(topic, None)

    def _delivery_error(self, error: KafkaError, message: Any) -> TidebookError:
        topic = message.topic()
        self._forget_if_missing(error, topic)
        if error.code() in TOO_LARGE:
            return InvalidInput(
                f"topic {topic!r}: Kafka refused a message of {len(message):,} bytes, or the batch that contained it "
                f"({error.str()}): it is not in the log; raise the topic's max.message.bytes, or send fewer at a time"
            )
        translated = not_acknowledged(error, topic, message.partition())
        if isinstance(translated, OutcomeUnknown):
            return OutcomeUnknown(
                f"topic {topic!r}: Kafka did not acknowledge a message ({error.str()}): it may be in the log; "
                "the backend 'db' would determine that, and send it once",
                partition=message.partition(),
            )
        return translated

    def _log_async_failures(self) -> None:
        """Log the client's lines and the failed messages of `kafka_async`."""
        self._producer.log_client_lines()
        while self._async_reports:
            error, message = self._async_reports.popleft()
            if error is not None:
                LOGGER.error("outbox: kafka_async: %s", self._delivery_error(error, message))
                self._metrics.count("outbox_kafka_async_failures", topic=message.topic())

    def close(self) -> None:
        """Send the queued messages."""
        deadline = time.monotonic() + self._timeout_s
        while len(self._producer) and time.monotonic() < deadline:
            self._serve(self._producer, POLL_S)
        self._log_async_failures()
