"""Kafka as the target of the outbox's relay."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
)

from tidebook.core.errors import InvalidInput, NotFound, TidebookError, Unavailable
from tidebook.kafka.client import admin_config, common_config
from tidebook.kafka.errors import TRANSIENT, UNKNOWN_TOPIC, failed, kafka_error
from tidebook.kafka.settings import KafkaSettings
from tidebook.outbox.fence import Fence
from tidebook.outbox.kafka.channel import KafkaChannel, KafkaTransactionChannel
from tidebook.outbox.kafka.producer import (
    CLOSING_MAX,
    MESSAGE_BYTES_MAX,
    ClientCall,
    RelayProducer,
    closing_count,
    fatal_cause,
    producer_settings,
)
from tidebook.outbox.kafka.replicated_ends import replicated_ends
from tidebook.outbox.kafka.scan import refuse_journal_topic, scan_range
from tidebook.outbox.port import FoundMessages, RelaySession, RelayTarget, TargetTopic
from tidebook.outbox.settings import OutboxSettings

T = TypeVar("T")

LOGGER = logging.getLogger("tidebook.outbox")

REQUEST_S_MAX = 10.0
#: How long one broker may take to name the others.
BROKERS_S_MAX = 2.0
NEW_TOPIC_PARTITIONS = 8
TOPIC_TTL_S = 60.0
ENDS_TTL_S = 10.0
BEFORE_MAX = "message.timestamp.before.max.ms"
TYPE = "message.timestamp.type"
_RETRIABLE = TRANSIENT | {KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.CONCURRENT_TRANSACTIONS}
_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_VERSION,
}
#: The poll interval while waiting for a producer's id.
ID_STEP_S = 0.05
RETRY_S = 0.1
PRODUCERS_MAX = 64
TRANSACTION_MS_MIN = 10_000
#: How long a call of the client may exceed its timeout.
GRACE_S = 1.0


class _Producers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, RelayProducer] = {}


class KafkaTarget(RelayTarget):
    """One Kafka cluster, shared by all threads of a relay.

    A topic's `message.timestamp.before.max.ms` is set to `fence_ms`, and accepted up to half the lock limit.
    """

    def __init__(self, kafka: KafkaSettings, settings: OutboxSettings, *, outbox: bytes) -> None:
        self._replication = kafka.replication or -1
        self._settings = settings
        #: Ids of topics that were found to hold no journals.
        self._checked: set[str] = set()
        self._client = common_config(kafka)
        self._compression = kafka.compression
        self._outbox = outbox
        #: The greatest `message.timestamp.before.max.ms` that is accepted.
        self._fence_ms_max = settings.lock_limit_ms // 2
        self._admin = AdminClient(admin_config(kafka))
        self._topics: dict[str, tuple[float, TargetTopic]] = {}
        self._ends: dict[str, tuple[float, dict[int, int]]] = {}
        self._of_thread = _Producers()

    # ---- topics

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """Return the topic, with its timestamp settings changed if the fence needs that and it is allowed."""
        known = self._topics.get(topic)
        if known is not None and not fresh and known[0] > time.monotonic():
            return known[1]
        found = self._describe(topic)
        self._topics[topic] = (time.monotonic() + TOPIC_TTL_S, found)
        return found

    def _describe(self, topic: str) -> TargetTopic:
        described, config = self._describe_or_create(topic)
        if str(described.topic_id) not in self._checked:
            refuse_journal_topic(self._client, topic, len(described.partitions))
            self._checked.add(str(described.topic_id))
        fence = Fence(self._settings.fence)
        fence_ms, weak = self._settings.fence_ms, None
        if fence is Fence.TIMESTAMP:
            weak, fence_ms = self._set_up_fence(topic, config)
            fence = Fence.NONE if weak is not None else fence
        elif fence is Fence.NONE:
            weak = "fence = 'none': a relay that stops for longer than the lock limit may send its batch again"
        return TargetTopic(
            topic=topic,
            uuid=str(described.topic_id),
            partitions=len(described.partitions),
            limit_bytes=min(int(config["max.message.bytes"]), int(config["segment.bytes"]), MESSAGE_BYTES_MAX),
            needs_key="compact" in config["cleanup.policy"],
            fence=fence,
            fence_ms=fence_ms,
            weak=weak,
        )

    def _describe_or_create(self, topic: str) -> tuple[Any, dict[str, str]]:
        """Return the topic's description and settings; create it if it is missing and that is allowed."""
        deadline = 0.0
        while True:
            try:
                described = self._request(lambda: self._admin.describe_topics(TopicCollection([topic]))[topic], topic)
                return described, self._config(topic)
            except NotFound:
                if not self._settings.create_topics or (deadline and time.monotonic() > deadline):
                    raise
                if not deadline:
                    deadline = time.monotonic() + REQUEST_S_MAX
                    self._create_topic(topic)
                time.sleep(RETRY_S)  # brokers learn of a new topic shortly after the controller

    def _create_topic(self, topic: str) -> None:
        config = {TYPE: "CreateTime", "cleanup.policy": "delete"}
        new = NewTopic(topic, NEW_TOPIC_PARTITIONS, self._replication, config=config)
        try:
            self._request(lambda: self._admin.create_topics([new], request_timeout=REQUEST_S_MAX)[topic], topic)
        except TidebookError as error:
            cause = error.__cause__
            exists = isinstance(cause, KafkaException) and kafka_error(cause).code() == KafkaError.TOPIC_ALREADY_EXISTS
            if not exists:
                raise
        LOGGER.info("outbox: topic %r was missing and was created with %d partitions", topic, NEW_TOPIC_PARTITIONS)

    def _config(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        found = self._request(lambda: next(iter(self._admin.describe_configs([resource]).values())), topic)
        return {name: str(entry.value) for name, entry in found.items()}

    def _set_up_fence(self, topic: str, config: Mapping[str, str]) -> tuple[str | None, int]:
        """Return why the broker cannot fence by timestamp (None if it can), and the age that records may have."""
        if config.get(TYPE) != "CreateTime":
            return f"{TYPE} is {config.get(TYPE)}: late messages are not refused; set it to CreateTime", 0
        before_ms = int(config.get(BEFORE_MAX, 0))
        if 0 < before_ms <= self._fence_ms_max:
            return None, before_ms
        remedy = f"set {BEFORE_MAX} of the topic to at most {self._fence_ms_max}"
        if not self._settings.configure_topics:
            return f"{BEFORE_MAX} is {before_ms} and configure_topics is off: {remedy}", 0
        entry = ConfigEntry(BEFORE_MAX, str(self._settings.fence_ms), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        try:
            self._request(lambda: next(iter(self._admin.incremental_alter_configs([resource]).values())), topic)
        except (Unavailable, InvalidInput) as error:
            cause = error.__cause__
            denied = isinstance(cause, KafkaException) and kafka_error(cause).code() in _DENIED
            if not denied and not isinstance(error, InvalidInput):
                raise  # Kafka did not answer: the topic is retried later
            return f"{BEFORE_MAX} is {before_ms} and could not be changed ({error}): {remedy}", 0
        return None, self._settings.fence_ms

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """Return the end offsets, possibly a few seconds old: a scan from them is then a little longer."""
        known = self._ends.get(topic.uuid)
        if known is not None and not fresh and known[0] > time.monotonic():
            return known[1]
        found = self._offsets(topic, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        self._ends[topic.uuid] = (time.monotonic() + ENDS_TTL_S, found)
        return found

    def _offsets(self, topic: TargetTopic, which: OffsetSpec) -> dict[int, int]:
        requests = {TopicPartition(topic.topic, p): which for p in range(topic.partitions)}

        def request() -> dict[int, int]:
            deadline = time.monotonic() + REQUEST_S_MAX
            futures = self._admin.list_offsets(requests, request_timeout=REQUEST_S_MAX)
            return {p.partition: f.result(max(0.0, deadline - time.monotonic())).offset for p, f in futures.items()}

        return self._retry(request, topic.topic)

    # ---- sending

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> KafkaChannel:
        """Return a channel over this thread's producer: one per message limit, or one per topic if transactional."""
        producers = self._of_thread.by_name
        transaction = topic.fence is Fence.TRANSACTION
        name = f"{topic.topic}:{topic.limit_bytes}" if transaction else str(topic.limit_bytes)
        producer = None if transaction and fresh else producers.get(name)
        if producer is None:
            producers.pop(name, None)
            producer = self._new_producer(topic)
            producers[name] = producer
            while len(producers) > PRODUCERS_MAX:
                del producers[next(iter(producers))]
        kind = KafkaTransactionChannel if transaction else KafkaChannel
        return kind(producer, topic, partial(producers.pop, name, None), singly=singly)

    def _producer_settings(self, topic: TargetTopic) -> dict[str, Any]:
        return producer_settings(self._client, limit_bytes=topic.limit_bytes, compression=self._compression)

    def _new_producer(self, topic: TargetTopic) -> RelayProducer:
        if closing_count() >= CLOSING_MAX:
            raise Unavailable(f"topic {topic.topic!r}: {CLOSING_MAX} producers are closing and have not ended")
        try:
            return self._transactional(topic) if topic.fence is Fence.TRANSACTION else self._idempotent(topic)
        except KafkaException as error:
            raise failed(error, f"topic {topic.topic!r}") from error
        except SystemError as error:  # a fatal error that a callback wrapped
            raise Unavailable(f"topic {topic.topic!r}: its producer failed: {error}") from error

    def _idempotent(self, topic: TargetTopic) -> RelayProducer:
        """Return a producer that has its id: waiting for it takes half a second, which a batch cannot spare."""
        # The id is read from the client's log lines. Statistics would be emitted forever, and pile up between polls.
        producer = RelayProducer(self._producer_settings(topic) | {"debug": "eos"})
        self._retry(lambda: producer.list_topics(topic.topic, REQUEST_S_MAX), topic.topic)  # connects
        deadline = time.monotonic() + REQUEST_S_MAX
        while not producer.has_id():
            if time.monotonic() > deadline:
                raise Unavailable(f"topic {topic.topic!r}: Kafka assigned no producer id within {REQUEST_S_MAX:g} s")
            producer.poll(ID_STEP_S)
        return producer

    def _transactional(self, topic: TargetTopic) -> RelayProducer:
        """Return a producer after it has fenced every older one of the topic and ended its transaction."""
        name = f"tidebook-outbox-{self._outbox.hex()}-{topic.topic}"
        timeout_ms = max(TRANSACTION_MS_MIN, self._fence_ms_max)
        settings = {"transactional.id": name, "transaction.timeout.ms": timeout_ms, "message.timeout.ms": timeout_ms}
        producer = RelayProducer(self._producer_settings(topic) | settings)
        self._retry(lambda: self._init_transactions(producer), topic.topic)
        return producer

    def _init_transactions(self, producer: RelayProducer) -> None:
        call = ClientCall(partial(producer.init_transactions, REQUEST_S_MAX))
        if not call.wait(REQUEST_S_MAX + GRACE_S):
            call.abandon()
            raise TimeoutError
        call.result()

    def scan(self, topic: TargetTopic, session: RelaySession, on_step: Callable[[], None]) -> FoundMessages:
        """Scan the topic for the session's messages; raise Unavailable while any may be there and not be visible."""
        ends = replicated_ends(self._client, self._brokers(topic), topic.topic, topic.partitions, on_step)
        # After the ends: an offset below a start is refused too, and a start above such an end shows that.
        starts = self._offsets(topic, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        return scan_range(self._client, topic.topic, session, starts=starts, ends=ends, on_step=on_step)

    def _brokers(self, topic: TargetTopic) -> list[str]:
        """Return the addresses of the cluster's brokers."""
        deadline = time.monotonic() + REQUEST_S_MAX
        while True:
            try:
                found = self._admin.list_topics(topic.topic, BROKERS_S_MAX).brokers.values()
                hosts = [(f"[{each.host}]" if ":" in str(each.host) else each.host, each.port) for each in found]
                return [f"{host}:{port}" for host, port in hosts]
            except KafkaException as error:  # the next request may go to another broker
                if time.monotonic() > deadline:
                    raise failed(error, f"topic {topic.topic!r}") from error

    def maintain(self) -> None:
        """Poll this thread's producers: the client's log lines and errors wait until they are polled."""
        producers = self._of_thread.by_name
        for name, producer in list(producers.items()):
            try:
                producer.poll(0)
            except (KafkaException, SystemError) as error:
                LOGGER.warning("outbox: an idle producer failed: %s", fatal_cause(error, producer).str())
                del producers[name]
            producer.log_client_lines()

    def close(self) -> None:
        """Clear the caches; producers are closed with their threads."""
        self._topics.clear()
        self._ends.clear()

    # ---- requests

    def _request(self, request: Callable[[], Future[T]], topic: str) -> T:
        return self._retry(lambda: request().result(REQUEST_S_MAX), topic)

    def _retry(self, request: Callable[[], T], topic: str) -> T:
        """Call `request`; retry while a partition leader is changing, for at most `REQUEST_S_MAX`."""
        deadline = time.monotonic() + REQUEST_S_MAX
        while time.monotonic() < deadline:
            try:
                return request()
            except KafkaException as error:
                failure = kafka_error(error)
                if failure.code() in UNKNOWN_TOPIC:
                    raise NotFound(f"topic {topic!r} does not exist: create it, and the relay continues") from error
                if failure.code() not in _RETRIABLE:
                    raise failed(failure, f"topic {topic!r}") from error
                time.sleep(RETRY_S)
            except TimeoutError as error:
                raise Unavailable(f"topic {topic!r}: Kafka did not answer for {REQUEST_S_MAX:g} s") from error
        raise Unavailable(f"topic {topic!r}: its leader is changing")
