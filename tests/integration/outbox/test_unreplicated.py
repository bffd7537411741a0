"""A message that a leader has appended and a paused follower withholds is neither lost nor sent twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.integration.outbox.databases import Database
from tests.integration.outbox.owner import Owner
from tests.integration.outbox.relaying import Cluster, publish, running, until
from tidebook.core.errors import Unavailable
from tidebook.outbox.kafka import replicated_ends
from tidebook.outbox.port import BatchSent, RelaySession
from tidebook.outbox.settings import OutboxSettings
from tidebook.testing.servers import Kafka
from tidebook.testing.servers.cluster import KafkaCluster

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(600)]

#: A paused follower withholds records for this time, and up to half of it longer: the controller removes none before.
LAG_MS = 20_000
PROPERTIES = {"replica.lag.time.max.ms": str(LAG_MS), "broker.session.timeout.ms": "90000"}
SETTINGS = OutboxSettings(lock_limit_s=2, fence_s=1, rest_s=0.2, poll_s=0.1)


@pytest.fixture(scope="module")
def brokers(kafka_bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Start three brokers, which a test may pause."""
    made = KafkaCluster(tmp_path_factory.mktemp("brokers") / "kafka")
    for node in made.nodes:
        assert isinstance(node, Kafka)
        node.properties |= PROPERTIES
    try:
        made.start()
        yield made
    finally:
        made.kill9()
        made.remove()


@pytest.fixture
def cluster(brokers: KafkaCluster) -> Iterator[Cluster]:
    """Return the cluster of three brokers."""
    made = Cluster(brokers.address)
    yield made
    made.close()


def pause_follower(brokers: KafkaCluster, cluster: Cluster, topic: str) -> tuple[Any, Path]:
    """Pause a follower of partition 0; return it, and the file of the partition's leader."""
    partition = cluster.admin.list_topics(topic, timeout=10).topics[topic].partitions[0]
    follower = next(id for id in partition.replicas if id != partition.leader)
    brokers.nodes[follower - 1].pause()
    leader = brokers.nodes[partition.leader - 1].folder
    return brokers.nodes[follower - 1], leader / "data" / f"{topic}-0" / f"{0:020}.log"


def send_one(owner: Owner, file: Path) -> None:
    """Send the owner's batch until the leader has appended it, and give it up."""
    owner.channel.start(owner.messages(), timestamp_ms=owner.batch.opened_ms)
    until(lambda: owner.channel.wait(0.05) is None and file.stat().st_size > 0, "the leader has appended the message")
    owner.channel.drop()


@contextmanager
def writing(cluster: Cluster, topic: str) -> Iterator[None]:
    """Write to all partitions of a topic from another thread, without a pause."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "linger.ms": 0})
    written, stop = threading.Event(), threading.Event()

    def write() -> None:
        while not stop.is_set():
            producer.produce(topic, b"noise", on_delivery=lambda *_: written.set())
            producer.poll(0.001)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert written.wait(60)
        yield
    finally:
        stop.set()
        thread.join()
        producer.flush(60)


def test_a_message_that_a_paused_follower_withholds_arrives_once(
    postgres: Database, brokers: KafkaCluster, cluster: Cluster
) -> None:
    topic = cluster.topic(partitions=1, replicas=3)
    publish(postgres, topic, (b"k", b"1"))
    dead = Owner(postgres, cluster, topic, SETTINGS)
    follower, file = pause_follower(brokers, cluster, topic)
    try:
        send_one(dead, file)
        dead.wait_until_lost()
        with running(cluster.relay(postgres, SETTINGS)) as relay:
            until(lambda: postgres.waiting() == 0, "the message is found", timeout_s=180)
            publish(postgres, topic, (b"k", b"2"))
            until(lambda: postgres.waiting() == 0, "the next message is sent", timeout_s=180)
    finally:
        follower.resume()
        dead.store.close()
    assert [each.value for each in cluster.read(topic)] == [b"1", b"2"]
    assert relay.metrics.counted("outbox_found") == 1


def test_a_scan_is_unavailable_until_a_message_that_is_not_replicated_is_visible(
    postgres: Database, brokers: KafkaCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated_ends, "SEARCH_S_MAX", 4.0)
    topic = cluster.topic(partitions=1, replicas=3)
    publish(postgres, topic, (b"k", b"1"))
    owner = Owner(postgres, cluster, topic, SETTINGS)
    ids = frozenset(row.id for row in owner.batch.messages)
    session = RelaySession(owner.batch.session, ids, 0, owner.topic.fence, owner.topic.uuid, {0: 0})
    follower, file = pause_follower(brokers, cluster, topic)
    try:
        send_one(owner, file)

        def is_withheld() -> bool:
            with pytest.raises(Unavailable) as raised:
                owner.target.scan(owner.topic, session, lambda: None)
            return "not replicated yet" in str(raised.value)  # else a request has waited for the paused broker

        until(is_withheld, "the scan finds a record that is not replicated")
    finally:
        follower.resume()
    monkeypatch.undo()
    assert owner.target.scan(owner.topic, session, lambda: None).ids == ids
    owner.store.close()


def test_a_scan_of_a_topic_that_is_written_to_ends(postgres: Database, cluster: Cluster) -> None:
    """Other producers' records in flight are above the high watermark all the time."""
    topic = cluster.topic(partitions=3, replicas=3)
    publish(postgres, topic, *((str(n).encode(), b"1") for n in range(30)))
    owner = Owner(postgres, cluster, topic, SETTINGS)
    assert isinstance(owner.send(), BatchSent)
    ids = frozenset(row.id for row in owner.batch.messages)
    session = RelaySession(owner.batch.session, ids, 0, owner.topic.fence, owner.topic.uuid, dict.fromkeys(range(3), 0))
    with writing(cluster, topic):
        assert owner.target.scan(owner.topic, session, lambda: None).ids == ids
    owner.store.close()
