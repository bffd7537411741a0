"""Relays, topics and a consumer's view of them, for tests."""

from __future__ import annotations

import faulthandler
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from tests.integration.outbox.databases import Database
from tidebook import outbox
from tidebook.kafka.settings import KafkaSettings
from tidebook.outbox import Message
from tidebook.outbox.kafka.target import KafkaTarget
from tidebook.outbox.mysql import MysqlOutboxDatabase
from tidebook.outbox.postgres import PostgresOutboxDatabase
from tidebook.outbox.relay import Relay
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.sqlite import SqliteOutboxDatabase
from tidebook.outbox.store import OutboxDatabase, OutboxStore
from tidebook.runtime.metrics import Metrics

WAIT_S_MAX = 60.0
#: A wait and the stop after it take less than pytest's own limit.
STOP_S_MAX = 30.0
#: The error of a broker that is the leader of a partition and does not know it yet.
NOT_LED_YET = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_LEADER_EPOCH,
)


class Seen(NamedTuple):
    """A message as a consumer receives it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, Any]
    timestamp_ms: int


class Cluster:
    """The operations of tests on the real Kafka."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.admin = AdminClient({"bootstrap.servers": bootstrap})

    def close(self) -> None:
        """Drop the client, which would otherwise reconnect for as long as this object is referenced."""
        del self.admin

    def topic(self, partitions: int = 3, *, replicas: int = 1, **config: str) -> str:
        """Create a topic with a new name."""
        name = f"outbox-{uuid.uuid4().hex[:12]}"
        self.make(name, partitions, replicas=replicas, **config)
        return name

    def make(self, name: str, partitions: int = 3, *, replicas: int = 1, **config: str) -> None:
        """Create a topic with this name."""
        wanted = {key.replace("_", "."): value for key, value in config.items()}
        self.admin.create_topics([NewTopic(name, partitions, replicas, config=wanted)])[name].result(30)
        until(lambda: self._led(name, partitions), "the topic has leaders")

    def recreate(self, name: str, partitions: int) -> None:
        """Delete the topic and create another one with the same name."""
        self.admin.delete_topics([name])[name].result(30)
        until(lambda: name not in self.admin.list_topics(timeout=10).topics, "the topic is deleted")
        self.make(name, partitions)

    def grow(self, name: str, partitions: int) -> None:
        """Give a topic more partitions."""
        self.admin.create_partitions([NewPartitions(name, partitions)])[name].result(30)
        until(lambda: self._led(name, partitions), "the partitions have leaders")

    def _led(self, name: str, partitions: int) -> bool:
        topic = self.admin.list_topics(name, timeout=10).topics[name]
        if len(topic.partitions) != partitions or any(p.leader < 0 for p in topic.partitions.values()):
            return False
        try:
            self._ends(name)
        except KafkaException as error:
            if error.args[0].code() not in NOT_LED_YET:
                raise
            return False
        return True

    def read(self, topic: str) -> list[Seen]:
        """Return all committed messages, in order within each partition."""
        config: dict[str, Any] = {"bootstrap.servers": self.bootstrap, "group.id": "test", "enable.auto.commit": False}
        config |= {"enable.partition.eof": True, "isolation.level": "read_committed", "auto.offset.reset": "earliest"}
        config["fetch.wait.max.ms"] = 10
        ends = self._ends(topic)
        consumer = Consumer(config)
        try:
            consumer.list_topics(topic, timeout=10)  # otherwise a client refreshes its leaders only once a second
            consumer.assign([TopicPartition(topic, p, 0) for p in ends])
            left = {p for p, end in ends.items() if end > 0}
            seen: list[Seen] = []
            deadline = time.monotonic() + WAIT_S_MAX
            while left:
                assert time.monotonic() < deadline, (
                    f"topic {topic} cannot be read to its end: {left} of {ends} are left"
                )
                for message in _news(consumer):
                    error = message.error()
                    if error is None:
                        seen.append(_seen(message))
                    elif error.code() != KafkaError._PARTITION_EOF:
                        raise AssertionError(error.str())
                    elif message.offset() >= ends[message.partition()]:
                        left.discard(message.partition())
            return sorted(seen)
        finally:
            consumer.close()

    def _ends(self, topic: str) -> dict[int, int]:
        partitions = self.admin.list_topics(topic, timeout=10).topics[topic].partitions
        asked = {TopicPartition(topic, p): OffsetSpec.latest() for p in partitions}  # type: ignore[no-untyped-call]
        committed = IsolationLevel.READ_COMMITTED
        reported = self.admin.list_offsets(asked, isolation_level=committed, request_timeout=10)
        return {place.partition: answer.result(10).offset for place, answer in reported.items()}

    def target(self, settings: OutboxSettings, identity: bytes = bytes(16)) -> KafkaTarget:
        """Return a target for a relay."""
        # Tests create and re-create their topics themselves.
        chosen = msgspec.structs.replace(settings, create_topics=False)
        return KafkaTarget(KafkaSettings.read(f"kafka://{self.bootstrap}"), chosen, outbox=identity)

    def relay(self, database: Database, settings: OutboxSettings | None = None) -> Relay:
        """Return a relay from this database to this cluster."""
        chosen = settings or OutboxSettings()
        return Relay(
            relay_database(database, chosen),
            lambda identity: self.target(chosen, identity),
            chosen,
            metrics=Metrics(),
        )


def _news(consumer: Consumer) -> list[Any]:
    """Return the available messages, or wait for the next one: `consume` with a timeout would wait for a thousand."""
    first = consumer.poll(0.5)
    return [] if first is None else [first, *consumer.consume(999, 0)]


def _seen(message: Any) -> Seen:
    headers = dict(message.headers() or ())
    return Seen(message.partition(), message.offset(), message.key(), message.value(), headers, message.timestamp()[1])


def relay_database(database: Database, settings: OutboxSettings) -> OutboxDatabase:
    """Return the outbox's database for a test's database."""
    match database.kind:
        case "postgresql":
            return PostgresOutboxDatabase(database.url, settings)
        case "mysql":
            return MysqlOutboxDatabase(database.url, settings)
        case _:
            return SqliteOutboxDatabase(Path(database.url.removeprefix("sqlite:///")), settings)


@contextmanager
def opened_store(database: Database, settings: OutboxSettings | None = None) -> Iterator[OutboxStore]:
    """Open one connection to the outbox."""
    store = relay_database(database, settings or OutboxSettings()).connect()
    try:
        yield store
    finally:
        store.close()


@contextmanager
def running(relay: Relay) -> Iterator[Relay]:
    """Run a relay in a thread; stop it at the end and raise its failure."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            relay.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)  # a relay that hangs must not hang the tests
    thread.start()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join(STOP_S_MAX)
        if thread.is_alive():
            faulthandler.dump_traceback()
        assert not thread.is_alive(), f"the relay did not end within {STOP_S_MAX} s: see the stacks of its threads"
        assert not failures


def publish(database: Database, topic: str, *messages: tuple[bytes | None, bytes]) -> None:
    """Publish (key, payload) pairs in one committed transaction."""
    with database.connect() as connection:
        outbox.publish_list(connection, [Message(topic, payload, key=key) for key, payload in messages])
        connection.commit()


def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S_MAX) -> None:
    """Wait until another process or thread has fulfilled the condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
