"""Kafka as the target of the outbox's relay."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
)

from tidebook.core.errors import InvalidInput, NotFound, Unavailable
from tidebook.log.kafka.client import common_config
from tidebook.log.kafka.faults import PASSING, UNKNOWN_TOPIC, failed, kafka_error
from tidebook.log.kafka.relay_channel import (
    MESSAGE_BYTES_MAX,
    KafkaChannel,
    KafkaTransactionChannel,
    producer_settings,
    transaction_settings,
)
from tidebook.log.kafka.relay_producer import ENDING_MAX, Call, RelayProducer, ending, fatal_cause
from tidebook.log.kafka.relay_scan import scan_range
from tidebook.log.kafka.settings import KafkaSettings
from tidebook.log.relay_port import Found, Scan, TargetTopic

T = TypeVar("T")

LOGGER = logging.getLogger("tidebook.outbox")

REQUEST_S_MAX = 10.0
TOPIC_KEPT_S = 60.0
ENDS_KEPT_S = 10.0
BEFORE_MAX = "message.timestamp.before.max.ms"
TYPE = "message.timestamp.type"
_TRY_AGAIN = PASSING | {KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.CONCURRENT_TRANSACTIONS}
_NOT_ALLOWED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_VERSION,
}
#: How long one look for a producer's id takes.
ID_STEP_S = 0.05
TRY_AGAIN_S = 0.1
PRODUCERS_MAX = 64
TRANSACTION_MS_LEAST = 10_000
#: What a call of the client may take past the time that it is given.
GRACE_S = 1.0


class KafkaTarget:
    """One cluster, for all threads of a relay.

    `fence_ms` is what a topic's `message.timestamp.before.max.ms` is set to, `fence_ms_most` what it may be at most.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        outbox: bytes,
        fence: Literal["timestamp", "transaction", "none"],
        fence_ms: int,
        fence_ms_most: int,
        configure_topics: bool = True,
    ) -> None:
        self._client = common_config(settings)
        self._compression = settings.compression
        self._outbox = outbox
        self._fence = fence
        self._fence_ms = fence_ms
        self._fence_ms_most = fence_ms_most
        self._configure = configure_topics
        self._admin = AdminClient(self._client)
        self._topics: dict[str, tuple[float, TargetTopic]] = {}
        self._ends: dict[str, tuple[float, dict[int, int]]] = {}
        self._mine = threading.local()

    # ---- topics

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """The topic, with its timestamps set up where the fence needs that and it is allowed."""
        known = self._topics.get(topic)
        if known is not None and not fresh and known[0] > time.monotonic():
            return known[1]
        found = self._describe(topic)
        self._topics[topic] = (time.monotonic() + TOPIC_KEPT_S, found)
        return found

    def _describe(self, topic: str) -> TargetTopic:
        described = self._ask(lambda: self._admin.describe_topics(TopicCollection([topic]))[topic], topic)
        config = self._config(topic)
        fence, fence_ms, weak = self._fence, self._fence_ms, None
        if fence == "timestamp":
            weak, fence_ms = self._prepare(topic, config)
            fence = "none" if weak is not None else fence
        elif fence == "none":
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

    def _config(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        found = self._ask(lambda: next(iter(self._admin.describe_configs([resource]).values())), topic)
        return {name: str(entry.value) for name, entry in found.items()}

    def _prepare(self, topic: str, config: Mapping[str, str]) -> tuple[str | None, int]:
        """Why the broker cannot fence by timestamp, and the age from which on it refuses a message."""
        if config.get(TYPE) != "CreateTime":
            return f"{TYPE} is {config.get(TYPE)}: late messages are not refused; set it to CreateTime", 0
        before_ms = int(config.get(BEFORE_MAX, 0))
        if 0 < before_ms <= self._fence_ms_most:
            return None, before_ms
        remedy = f"set {BEFORE_MAX} of the topic to at most {self._fence_ms_most}"
        if not self._configure:
            return f"{BEFORE_MAX} is {before_ms} and configure_topics is off: {remedy}", 0
        entry = ConfigEntry(BEFORE_MAX, str(self._fence_ms), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        try:
            self._ask(lambda: next(iter(self._admin.incremental_alter_configs([resource]).values())), topic)
        except (Unavailable, InvalidInput) as error:
            if not _refuses(error):  # it only does not answer: the topic rests
                raise
            return f"{BEFORE_MAX} is {before_ms} and could not be changed ({error}): {remedy}", 0
        return None, self._fence_ms

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """Where the next messages will stand, or would have a moment ago: a scan is then a little longer."""
        known = self._ends.get(topic.uuid)
        if known is not None and not fresh and known[0] > time.monotonic():
            return known[1]
        found = self._offsets(topic, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        self._ends[topic.uuid] = (time.monotonic() + ENDS_KEPT_S, found)
        return found

    def _offsets(self, topic: TargetTopic, which: OffsetSpec) -> dict[int, int]:
        asked = {TopicPartition(topic.topic, p): which for p in range(topic.partitions)}

        def ask() -> dict[int, int]:
            by = time.monotonic() + REQUEST_S_MAX
            futures = self._admin.list_offsets(asked, request_timeout=REQUEST_S_MAX)
            return {p.partition: f.result(max(0.0, by - time.monotonic())).offset for p, f in futures.items()}

        return self._again(ask, topic.topic)

    # ---- sending

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> KafkaChannel:
        """This thread's producer: one for all topics of a limit, or one a topic where it is transactional."""
        producers = self._producers()
        transaction = topic.fence == "transaction"
        name = f"{topic.topic}:{topic.limit_bytes}" if transaction else str(topic.limit_bytes)
        producer = None if transaction and fresh else producers.get(name)
        if producer is None:
            producers.pop(name, None)
            producer = self._new(topic)
            producers[name] = producer
            while len(producers) > PRODUCERS_MAX:
                del producers[next(iter(producers))]
        kind = KafkaTransactionChannel if transaction else KafkaChannel
        return kind(producer, topic, lambda: _forget(producers, name), singly=singly)

    def _settings(self, topic: TargetTopic) -> dict[str, Any]:
        return producer_settings(self._client, limit_bytes=topic.limit_bytes, compression=self._compression)

    def _new(self, topic: TargetTopic) -> RelayProducer:
        if ending() >= ENDING_MAX:
            raise Unavailable(f"topic {topic.topic!r}: {ENDING_MAX} producers are about to end, and do not")
        try:
            return self._transactional(topic) if topic.fence == "transaction" else self._idempotent(topic)
        except KafkaException as error:
            raise failed(error, f"topic {topic.topic!r}") from error
        except SystemError as error:  # a fatal error, wrapped by a callback
            raise Unavailable(f"topic {topic.topic!r}: its producer failed: {error}") from error

    def _idempotent(self, topic: TargetTopic) -> RelayProducer:
        """A producer that may send at once: a new one waits for its id, half a second of a batch's short life."""
        # Not by statistics: they would go on for ever, and pile up while nobody polls.
        producer = RelayProducer(self._settings(topic) | {"debug": "eos"})
        self._again(lambda: producer.list_topics(topic.topic, REQUEST_S_MAX), topic.topic)  # connects
        deadline = time.monotonic() + REQUEST_S_MAX
        while not producer.has_id():
            if time.monotonic() > deadline:
                raise Unavailable(f"topic {topic.topic!r}: Kafka gave no producer id for {REQUEST_S_MAX:g} s")
            producer.poll(ID_STEP_S)
        return producer

    def _transactional(self, topic: TargetTopic) -> RelayProducer:
        """Fences every older producer of the topic, and ends what it had begun, before it returns."""
        name = f"tidebook-outbox-{self._outbox.hex()}-{topic.topic}"
        settings = transaction_settings(name, timeout_ms=max(TRANSACTION_MS_LEAST, self._fence_ms_most))
        producer = RelayProducer(self._settings(topic) | settings)
        self._again(lambda: self._init(producer), topic.topic)
        return producer

    def _init(self, producer: RelayProducer) -> None:
        call = Call(partial(producer.init_transactions, REQUEST_S_MAX))
        if not call.wait(REQUEST_S_MAX + GRACE_S):
            call.give_up()
            raise TimeoutError
        call.result()

    def _producers(self) -> dict[str, RelayProducer]:
        found: dict[str, RelayProducer] | None = getattr(self._mine, "producers", None)
        if found is None:
            found = self._mine.producers = {}
        return found

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> Found:
        """Read what the topic holds now."""
        if scan.topic_uuid is not None and scan.topic_uuid != topic.uuid:
            return Found(frozenset(), f"the topic was made anew (it was {scan.topic_uuid}, it is {topic.uuid})")
        starts = self._offsets(topic, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        return scan_range(
            self._client, topic.topic, scan, starts=starts, ends=self.ends(topic, fresh=True), on_step=on_step
        )

    def release(self, topic: str) -> None:
        """Producers stay warm: a new one takes half a second to be ready."""

    def tend(self) -> None:
        """Serve this thread's producers: what the client says waits in each until somebody polls."""
        producers = self._producers()
        for name, producer in list(producers.items()):
            try:
                producer.poll(0)
            except (KafkaException, SystemError) as error:
                LOGGER.warning("outbox: an idle producer failed: %s", fatal_cause(error, producer).str())
                del producers[name]
            producer.tell()

    def close(self) -> None:
        """Producers go with their threads."""
        self._topics.clear()
        self._ends.clear()

    # ---- asking

    def _ask(self, request: Callable[[], Future[T]], topic: str) -> T:
        return self._again(lambda: request().result(REQUEST_S_MAX), topic)

    def _again(self, ask: Callable[[], T], topic: str) -> T:
        """Ask, and ask again while a leader is on the move."""
        deadline = time.monotonic() + REQUEST_S_MAX
        while time.monotonic() < deadline:
            try:
                return ask()
            except KafkaException as error:
                failure = kafka_error(error)
                if failure.code() in UNKNOWN_TOPIC:
                    raise NotFound(f"topic {topic!r} does not exist: create it, and the relay goes on") from error
                if failure.code() not in _TRY_AGAIN:
                    raise failed(failure, f"topic {topic!r}") from error
                time.sleep(TRY_AGAIN_S)
            except TimeoutError as error:
                raise Unavailable(f"topic {topic!r}: Kafka did not answer for {REQUEST_S_MAX:g} s") from error
        raise Unavailable(f"topic {topic!r}: its leader is on the move")


def _refuses(error: Unavailable | InvalidInput) -> bool:
    """Whether Kafka will not do it, by its rules or for this user."""
    if isinstance(error, InvalidInput):
        return True
    cause = error.__cause__
    return isinstance(cause, KafkaException) and kafka_error(cause).code() in _NOT_ALLOWED


def _forget(producers: dict[str, RelayProducer], name: str) -> None:
    producers.pop(name, None)
