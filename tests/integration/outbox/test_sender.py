"""A direct, non-transactional `send()` follows changes in the number of a topic's partitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.outbox.relaying import Cluster, until
from tidebook.core.errors import NotFound, OutcomeUnknown
from tidebook.kafka.settings import KafkaSettings
from tidebook.outbox import Message
from tidebook.outbox.kafka import sender as relay_sender
from tidebook.outbox.kafka.producer import choose_partition
from tidebook.outbox.kafka.sender import KafkaSender
from tidebook.runtime.metrics import Metrics

pytestmark = pytest.mark.kafka


@pytest.fixture
def sender(cluster: Cluster) -> Iterator[KafkaSender]:
    settings = KafkaSettings.read(f"kafka://{cluster.bootstrap}", {"send_timeout_ms": 3_000})
    made = KafkaSender(settings, Metrics())
    yield made
    made.close()


def partitions_and_payloads(cluster: Cluster, topic: str) -> list[tuple[int, bytes | None]]:
    return [(each.partition, each.value) for each in cluster.read(topic)]


def test_direct_sends_use_the_partitions_of_a_topic_that_was_recreated_with_fewer(
    cluster: Cluster, sender: KafkaSender
) -> None:
    topic, chosen = cluster.topic(partitions=8), b"p"
    assert choose_partition(chosen, 8) >= 2
    sender.send([Message(topic, b"1", partition_key=chosen)], wait=True)
    assert partitions_and_payloads(cluster, topic) == [(choose_partition(chosen, 8), b"1")]
    cluster.recreate(topic, partitions=2)

    def sent() -> bool:
        try:
            sender.send([Message(topic, b"2", partition_key=chosen)], wait=True)
        except (NotFound, OutcomeUnknown):
            return False
        return True

    until(sent, "a message was sent to the recreated topic")
    assert (choose_partition(chosen, 2), b"2") in partitions_and_payloads(cluster, topic)


def test_direct_sends_use_added_partitions_after_the_cached_count_expires(
    cluster: Cluster, sender: KafkaSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = cluster.topic(partitions=1)
    chosen = next(key for key in (b"%d" % n for n in range(99)) if choose_partition(key, 2) == 1)
    sender.send([Message(topic, b"1", partition_key=chosen)], wait=True)
    cluster.grow(topic, partitions=2)
    sender.send([Message(topic, b"2", partition_key=chosen)], wait=True)
    monkeypatch.setattr(relay_sender, "PARTITION_COUNT_TTL_S", 0.0)
    sender.send([Message(topic, b"3", partition_key=chosen)], wait=True)
    assert partitions_and_payloads(cluster, topic) == [(0, b"1"), (0, b"2"), (1, b"3")]
