"""Create, validate, describe, delete and truncate topics on the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
)

from tidebook.core.errors import InvalidInput, NotFound, TidebookError, Unavailable
from tidebook.core.key import topic_name
from tidebook.kafka.client import admin_config, connect
from tidebook.kafka.errors import REFUSED, TRANSIENT, UNKNOWN_TOPIC, failed, kafka_error
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.port import TopicState
from tidebook.runtime.futures import ignore_failure

#: The maximum overhead of a batch, a key and headers, without a record's value.
FRAME_BYTES = 4096
_POLL_S = 0.02

#: The topic configuration that a log requires, and why.
REQUIRED_CONFIG: Mapping[str, tuple[str, str]] = {
    "cleanup.policy": ("delete", "compaction would drop records that are still needed"),
    "message.timestamp.type": ("LogAppendTime", "the clocks of clients must not order the records"),
    "unclean.leader.election.enable": ("false", "an unclean leader loses acknowledged records"),
}


class KafkaTopic(msgspec.Struct, frozen=True):
    """A topic as it was last described."""

    state: TopicState
    #: The largest batch to send: the broker's limit, or less.
    batch_bytes_max: int
    #: The largest value of a record.
    limit_bytes: int


def new_topic_config(settings: KafkaSettings, *, limit_bytes: int | None, keep_forever: bool) -> dict[str, str]:
    """Return the broker configuration of a new topic."""
    config = {name: value for name, (value, _) in REQUIRED_CONFIG.items()}
    config["retention.ms"] = "-1" if keep_forever else str(settings.retention_ms)
    config["retention.bytes"] = "-1" if keep_forever else str(settings.retention_bytes)
    if limit_bytes is not None:
        config["max.message.bytes"] = str(limit_bytes + FRAME_BYTES)
    if settings.min_insync_replicas is not None:
        config["min.insync.replicas"] = str(settings.min_insync_replicas)
    return config


def check_topic(topic: str, config: Mapping[str, str]) -> None:
    """Raise InvalidInput for a topic whose configuration would lose or reorder records."""
    wrong = [
        f"{name} is {config.get(name)} and must be {required} ({why})"
        for name, (required, why) in REQUIRED_CONFIG.items()
        if config.get(name) != required
    ]
    if wrong:
        raise InvalidInput(
            f"topic {topic} cannot hold a log: {'; '.join(wrong)}: change it with kafka-configs, or use another topic"
        )


def check_requested(topic: str, config: Mapping[str, str], *, limit_bytes: int | None, keep_forever: bool) -> None:
    """Raise InvalidInput if an existing topic does not satisfy the arguments of `create_topic`."""
    if keep_forever and (config.get("retention.ms"), config.get("retention.bytes")) != ("-1", "-1"):
        raise InvalidInput(
            f"topic {topic} must keep its records forever, but has retention.ms={config.get('retention.ms')}, "
            f"retention.bytes={config.get('retention.bytes')}: set both to -1 with kafka-configs"
        )
    actual_bytes = int(config["max.message.bytes"])
    if limit_bytes is not None and actual_bytes < limit_bytes + FRAME_BYTES:
        raise InvalidInput(
            f"topic {topic} must accept records of {limit_bytes:,} bytes, but has max.message.bytes={actual_bytes}: "
            f"set it to {limit_bytes + FRAME_BYTES} with kafka-configs"
        )


class Topics:
    """Manages the broker's topics with one admin client, whose callbacks run in its own thread."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        #: Resolved when the client is closed, because requests in flight then never complete.
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: The last authentication or authorization error of the client, and when it occurred.
        self._refusal: tuple[KafkaError, float] | None = None
        self._timeout_s = settings.request_timeout_ms / 1000
        self._timeout: Any = {"request_timeout": self._timeout_s}

    @cached_property
    def _client(self) -> AdminClient:
        if self._closed.done():
            raise closed_error()
        return connect(AdminClient, admin_config(self._settings) | {"error_cb": self._on_error})

    async def find(self, topic: str) -> KafkaTopic | None:
        """Return the topic as it is now, validated, or None if it does not exist."""
        found = await self._describe(topic)
        if found is None:
            return None
        check_topic(topic, found[1])
        return self._topic(*found)

    async def names(self) -> list[str]:
        """Return the names of all topics but the internal ones."""
        try:
            metadata = await asyncio.to_thread(self._client.list_topics, timeout=self._timeout_s)
        except KafkaException as error:
            raise self._failed(error, "listing topics") from error
        return sorted(name for name, each in metadata.topics.items() if not name.startswith("__") and not each.error)

    async def create(self, topic: str, partitions: int, *, limit_bytes: int | None, keep_forever: bool) -> KafkaTopic:
        """Create the topic unless it exists, and return when every partition has a leader."""
        topic_name(topic)
        if partitions < 1:
            raise InvalidInput(f"topic {topic} needs at least one partition, not {partitions}")
        config = new_topic_config(self._settings, limit_bytes=limit_bytes, keep_forever=keep_forever)
        operation = f"creating topic {topic}"
        new = NewTopic(topic, partitions, self._settings.replication or -1, config=config)
        exists = KafkaError.TOPIC_ALREADY_EXISTS
        await self._request(operation, lambda: self._client.create_topics([new], **self._timeout), exists)
        async with _deadline(self._timeout_s, operation):
            while (found := await self._describe(topic)) is None:  # noqa: ASYNC110 - the broker sends no event
                await asyncio.sleep(_POLL_S)
        check_topic(topic, found[1])
        check_requested(topic, found[1], limit_bytes=limit_bytes, keep_forever=keep_forever)
        return self._topic(*found)

    async def delete(self, topic: str) -> None:
        """Delete the topic, and return when the broker no longer lists it."""
        operation = f"deleting topic {topic}"
        await self._request(operation, lambda: self._client.delete_topics([topic], **self._timeout))
        async with _deadline(self._timeout_s, operation):
            while await self._describe(topic) is not None:  # noqa: ASYNC110 - the broker sends no event
                await asyncio.sleep(_POLL_S)

    async def truncate(self, topic: str, partition: int, before: int) -> None:
        """Delete the records below `before` (DeleteRecords)."""
        at = TopicPartition(topic, partition, before)
        operation = f"truncating {topic}/{partition} before {before}"
        await self._request(operation, lambda: self._client.delete_records([at], **self._timeout))

    async def _describe(self, topic: str) -> tuple[TopicState, dict[str, str]] | None:
        operation, resource = f"looking for topic {topic}", ConfigResource(ConfigResource.Type.TOPIC, topic)
        described = await self._request(
            operation, lambda: self._client.describe_topics(TopicCollection([topic]), **self._timeout), *UNKNOWN_TOPIC
        )
        if described is None:
            return None
        entries = await self._request(
            operation, lambda: self._client.describe_configs([resource], **self._timeout), *UNKNOWN_TOPIC
        )
        if entries is None:
            return None
        state = TopicState(topic, str(described.topic_id), len(described.partitions))
        return state, {name: str(entry.value) for name, entry in entries.items()}

    async def _request(self, operation: str, send: Callable[[], Mapping[Any, Future[Any]]], *ignored: int) -> Any:
        """Return the only result of a request, or None after an ignored error; retry while a leader is elected.

        `send` must not refer to the client itself: an error's traceback could keep it alive until a garbage collection.
        """
        async with _deadline(self._timeout_s, operation):
            while True:
                futures = send()  # the map must stay referenced until the future is done
                (answer,) = map(asyncio.wrap_future, futures.values())
                answer.add_done_callback(ignore_failure)
                # This does not cancel the answer: the client fails on a cancelled future.
                await asyncio.wait((answer, self._closed), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise closed_error()
                try:
                    return answer.result()
                except KafkaException as error:
                    code = kafka_error(error).code()
                    if code in ignored:
                        return None
                    if code not in TRANSIENT:
                        raise self._failed(error, operation) from error
                await asyncio.sleep(_POLL_S)

    def _topic(self, state: TopicState, config: Mapping[str, str]) -> KafkaTopic:
        broker_bytes = int(config["max.message.bytes"])
        return KafkaTopic(state, min(broker_bytes, self._settings.batch_bytes_max), broker_bytes - FRAME_BYTES)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() in REFUSED:
            self._refusal = (error, time.monotonic())

    def _failed(self, error: KafkaException, operation: str) -> TidebookError:
        """Return the error of a request; if no broker was reachable, the last authentication error may be its cause."""
        self._client.poll(0)
        unreachable = kafka_error(error).code() in {KafkaError._TIMED_OUT, KafkaError._TRANSPORT}
        if unreachable and self._refusal is not None and time.monotonic() - self._refusal[1] <= self._timeout_s:
            return failed(self._refusal[0], operation)
        return failed(error, operation)

    async def close(self) -> None:
        """Close the client."""
        self._closed.set_result(None)
        clients = [self.__dict__.pop("_client", None)]
        await asyncio.to_thread(clients.clear)  # in a thread, because freeing the client waits for its threads


def closed_error() -> Unavailable:
    """Return the error for the use of a closed log."""
    return Unavailable("this log is closed: open it again")


@asynccontextmanager
async def _deadline(seconds: float, operation: str) -> AsyncIterator[None]:
    """Raise an error that names the operation if it takes too long."""
    try:
        async with asyncio.timeout(seconds + 1):  # the client's own timeout comes first and has a better message
            yield
    except TimeoutError as late:
        raise Unavailable(f"{operation}: Kafka did not respond in time") from late


def not_found(topic: str, partition: int | None = None) -> NotFound:
    """Return the error for a topic or a partition that does not exist."""
    return NotFound(f"there is no topic {topic}" if partition is None else f"there is no partition {topic}/{partition}")
