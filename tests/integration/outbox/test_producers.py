"""The relay polls its idle producers; a topic rests if its producer cannot be created or hangs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.integration.outbox.databases import Database
from tests.integration.outbox.owner import short
from tests.integration.outbox.relaying import Cluster, publish, running, until
from tidebook.core.errors import Unavailable
from tidebook.outbox.kafka.producer import CLOSING_MAX, RelayProducer
from tidebook.outbox.kafka.target import KafkaTarget
from tidebook.outbox.port import TargetTopic
from tidebook.outbox.settings import OutboxSettings

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def test_an_idle_producer_accumulates_no_events(cluster: Cluster) -> None:
    target = cluster.target(OutboxSettings())
    target.channel(target.topic(cluster.topic(partitions=1)), fresh=True)
    [producer] = target._of_thread.by_name.values()
    assert producer.has_id()
    producer.poll(0)
    _: Any = threading.Event().wait(1)  # time in which events would accumulate
    assert len(producer) == 0


def test_an_idle_relay_serves_its_producers(
    postgres: Database, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = cluster.topic(partitions=1)
    maintained: list[int] = []
    maintain = KafkaTarget.maintain

    def counted(target: KafkaTarget) -> None:
        maintained.append(len(target._of_thread.by_name))
        maintain(target)

    monkeypatch.setattr(KafkaTarget, "maintain", counted)
    with running(cluster.relay(postgres)) as relay:
        publish(postgres, topic, (b"k", b"1"))
        until(lambda: relay.metrics.counted("outbox_sent") == 1, "the message is sent")
        maintained.clear()
        until(lambda: maintained.count(1) >= 2, "the idle producer was maintained twice", timeout_s=10)


def test_a_topic_whose_limit_exceeds_the_clients_is_relayed(postgres: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1, max_message_bytes="2147483647")
    publish(postgres, topic, (b"k", b"1"))
    assert cluster.relay(postgres).run(once=True) == 1


def test_only_the_topic_whose_producer_cannot_be_created_rests(
    postgres: Database, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, topic = cluster.topic(partitions=1, max_message_bytes="20000"), cluster.topic(partitions=1)
    real = KafkaTarget._producer_settings

    def settings(target: KafkaTarget, of: TargetTopic) -> dict[str, Any]:
        return real(target, of) | ({"batch.size": -1} if of.topic == odd else {})

    monkeypatch.setattr(KafkaTarget, "_producer_settings", settings)
    for each in (odd, topic):
        publish(postgres, each, (b"k", b"1"))
    relay = cluster.relay(postgres)
    assert relay.run(once=True) == 1
    assert relay.metrics.counted("outbox_rests", topic=odd) == 1


def test_a_topic_whose_client_call_hangs_rests_only_once(
    postgres: Database, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, go = cluster.topic(partitions=1), threading.Event()
    begin = RelayProducer.begin_transaction
    calls: list[None] = []

    def hang(producer: RelayProducer) -> None:
        calls.append(None)
        if len(calls) == 1:
            go.wait(60)
        begin(producer)

    monkeypatch.setattr(RelayProducer, "begin_transaction", hang)
    publish(postgres, topic, (b"k", b"1"), (b"k", b"2"))
    try:
        with running(cluster.relay(postgres, short("transaction"))) as relay:
            until(lambda: postgres.waiting() == 0, "the message is sent by another producer")
            assert relay.metrics.counted("outbox_rests") == 1
    finally:
        go.set()
    assert [each.value for each in cluster.read(topic)] == [b"1", b"2"]


def test_no_producer_is_created_while_too_many_are_still_closing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = cluster.target(OutboxSettings())
    topic = target.topic(cluster.topic(partitions=1))
    monkeypatch.setattr("tidebook.outbox.kafka.target.closing_count", lambda: CLOSING_MAX)
    with pytest.raises(Unavailable, match="are closing"):
        target.channel(topic, fresh=True)
