"""Topics on the broker: made as a log needs them, checked when they are met, described, removed, truncated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
)

from tidebook.core.errors import InvalidInput, NotFound, TidebookError, Unavailable
from tidebook.core.key import topic_name
from tidebook.log.kafka.client import common_config, connect
from tidebook.log.kafka.faults import PASSING, REFUSED, UNKNOWN_TOPIC, failed, kafka_error
from tidebook.log.kafka.settings import KafkaSettings
from tidebook.log.port import TopicState

#: What a batch, a key and headers may take beside a record's value.
FRAME_BYTES = 4096
_LOOK_AGAIN_S = 0.02

#: What a log cannot do without, and why.
NEEDED: Mapping[str, tuple[str, str]] = {
    "cleanup.policy": ("delete", "compaction would drop records that are still needed"),
    "message.timestamp.type": ("LogAppendTime", "the log's own clock orders records, not its clients'"),
    "unclean.leader.election.enable": ("false", "an unclean leader loses acknowledged records"),
}

T = TypeVar("T")


class KafkaTopic(msgspec.Struct, frozen=True):
    """A topic as it was last seen."""

    state: TopicState
    #: The largest batch to send there: what the broker takes, or less.
    batch_bytes_max: int
    #: The largest value of a record.
    limit_bytes: int


def new_topic_config(settings: KafkaSettings, *, limit_bytes: int | None, keep_forever: bool) -> dict[str, str]:
    """The broker's settings of a new topic."""
    config = {name: value for name, (value, _) in NEEDED.items()}
    config["retention.ms"] = "-1" if keep_forever else str(settings.retention_ms)
    config["retention.bytes"] = "-1" if keep_forever else str(settings.retention_bytes)
    if limit_bytes is not None:
        config["max.message.bytes"] = str(limit_bytes + FRAME_BYTES)
    if settings.min_insync_replicas is not None:
        config["min.insync.replicas"] = str(settings.min_insync_replicas)
    return config


def check_topic(topic: str, config: Mapping[str, str]) -> None:
    """Refuse a topic on which a log would lose or disorder records."""
    wrong = [
        f"{name} is {config.get(name)} and must be {wanted} ({why})"
        for name, (wanted, why) in NEEDED.items()
        if config.get(name) != wanted
    ]
    if wrong:
        raise InvalidInput(
            f"topic {topic} cannot hold a log: {'; '.join(wrong)}: change it with kafka-configs, or name another topic"
        )


def check_wishes(topic: str, config: Mapping[str, str], *, limit_bytes: int | None, keep_forever: bool) -> None:
    """Refuse an existing topic that is less than what is asked for now."""
    if keep_forever and (config.get("retention.ms"), config.get("retention.bytes")) != ("-1", "-1"):
        raise InvalidInput(
            f"topic {topic} must keep its records for ever, and has retention.ms={config.get('retention.ms')}, "
            f"retention.bytes={config.get('retention.bytes')}: set both to -1 with kafka-configs"
        )
    has_bytes = int(config["max.message.bytes"])
    if limit_bytes is not None and has_bytes < limit_bytes + FRAME_BYTES:
        raise InvalidInput(
            f"topic {topic} must take records of {limit_bytes:,} bytes, and has max.message.bytes={has_bytes}: "
            f"set it to {limit_bytes + FRAME_BYTES} with kafka-configs"
        )


class Topics:
    """The broker's topics, through one admin client whose answers come in its own thread."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._client = connect(AdminClient, common_config(settings) | {"error_cb": self._note})
        #: Why no server lets us in, and when the client said so.
        self._refusal: tuple[KafkaError, float] | None = None
        self._timeout_s = settings.request_timeout_ms / 1000

    async def find(self, topic: str) -> KafkaTopic | None:
        """The topic as it is now, checked; None where there is none."""
        found = await self._look(topic)
        if found is None:
            return None
        check_topic(topic, found[1])
        return self._topic(*found)

    async def names(self) -> list[str]:
        """All topics but the broker's own."""
        try:
            metadata = await asyncio.to_thread(self._client.list_topics, timeout=self._timeout_s)
        except KafkaException as error:
            raise self._failed(error, "listing topics") from error
        return sorted(name for name, each in metadata.topics.items() if not name.startswith("__") and not each.error)

    async def create(self, topic: str, partitions: int, *, limit_bytes: int | None, keep_forever: bool) -> KafkaTopic:
        """Make the topic unless it is there, and return when every partition has a leader."""
        topic_name(topic)
        if partitions < 1:
            raise InvalidInput(f"topic {topic}: it needs at least one partition, not {partitions}")
        config = new_topic_config(self._settings, limit_bytes=limit_bytes, keep_forever=keep_forever)
        new = NewTopic(topic, partitions, self._settings.replication or -1, config=config)
        try:
            await self._answer(self._client.create_topics([new], request_timeout=self._timeout_s)[topic])
        except KafkaException as error:
            if kafka_error(error).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise self._failed(error, f"making topic {topic}") from error
        async with _deadline(self._timeout_s, f"making topic {topic}"):
            while (found := await self._look(topic)) is None:  # noqa: ASYNC110 - only the broker knows
                await asyncio.sleep(_LOOK_AGAIN_S)
        check_topic(topic, found[1])
        check_wishes(topic, found[1], limit_bytes=limit_bytes, keep_forever=keep_forever)
        return self._topic(*found)

    async def delete(self, topic: str) -> None:
        """Remove the topic, and return when it is no longer seen."""
        try:
            await self._answer(self._client.delete_topics([topic], request_timeout=self._timeout_s)[topic])
        except KafkaException as error:
            raise self._failed(error, f"deleting topic {topic}") from error
        async with _deadline(self._timeout_s, f"deleting topic {topic}"):
            while await self._look(topic) is not None:  # noqa: ASYNC110 - only the broker knows
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def truncate(self, topic: str, partition: int, before: int) -> None:
        """DeleteRecords: the leader moves its log start."""
        at = TopicPartition(topic, partition, before)
        doing = f"truncating {topic}/{partition} before {before}"
        try:
            await self._retried(
                lambda: _only(self._client.delete_records([at], request_timeout=self._timeout_s)), doing
            )
        except KafkaException as error:
            raise self._failed(error, doing) from error

    async def _look(self, topic: str) -> tuple[TopicState, dict[str, str]] | None:
        doing = f"looking for topic {topic}"
        try:
            described = await self._retried(
                lambda: self._client.describe_topics(TopicCollection([topic]), request_timeout=self._timeout_s)[topic],
                doing,
            )
            resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
            entries = await self._retried(
                lambda: self._client.describe_configs([resource], request_timeout=self._timeout_s)[resource], doing
            )
        except KafkaException as error:
            if kafka_error(error).code() in UNKNOWN_TOPIC:
                return None
            raise self._failed(error, doing) from error
        state = TopicState(topic, str(described.topic_id), len(described.partitions))
        return state, {name: str(entry.value) for name, entry in entries.items()}

    async def _retried(self, ask: Any, doing: str) -> Any:
        """Ask again while a leader is being found."""
        async with _deadline(self._timeout_s, doing):
            while True:
                try:
                    return await self._answer(ask())
                except KafkaException as error:
                    if kafka_error(error).code() not in PASSING:
                        raise
                await asyncio.sleep(_LOOK_AGAIN_S)

    def _topic(self, state: TopicState, config: Mapping[str, str]) -> KafkaTopic:
        broker_bytes = int(config["max.message.bytes"])
        return KafkaTopic(state, min(broker_bytes, self._settings.batch_bytes_max), broker_bytes - FRAME_BYTES)

    def _note(self, error: KafkaError) -> None:
        if error.code() in REFUSED:
            self._refusal = (error, time.monotonic())

    def _failed(self, error: KafkaException, doing: str) -> TidebookError:
        """A request that found no server says why none let us in, and so do those that fail beside it."""
        self._client.poll(0)
        silent = kafka_error(error).code() in {KafkaError._TIMED_OUT, KafkaError._TRANSPORT}
        if silent and self._refusal is not None and time.monotonic() - self._refusal[1] <= self._timeout_s:
            return failed(self._refusal[0], doing)
        return failed(error, doing)

    async def _answer(self, future: Future[T]) -> T:
        answer = asyncio.wrap_future(future)
        answer.add_done_callback(_seen)
        return await asyncio.shield(answer)  # the client stumbles over a future that was cancelled

    async def close(self) -> None:
        """Let go of the client."""
        clients = [self._client]
        del self._client
        await asyncio.to_thread(clients.clear)  # away from the event loop: its end waits for its threads


def _seen(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()  # whoever asked may be gone


def _only(futures: Mapping[Any, Future[Any]]) -> Future[Any]:
    """The one future of the map, which stays in it: the client looks for it there."""
    (future,) = futures.values()
    return future


class _deadline:
    """`asyncio.timeout` that tells what was being done."""

    def __init__(self, seconds: float, doing: str) -> None:
        self._timeout = asyncio.timeout(seconds + 1)  # the client's own timeout comes first, and knows more
        self._doing = doing

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise Unavailable(f"{self._doing}: Kafka did not answer in time") from late


def unknown(topic: str, partition: int | None = None) -> NotFound:
    """No such topic, or no such partition of it."""
    return NotFound(f"there is no topic {topic}" if partition is None else f"there is no partition {topic}/{partition}")
