"""The relay's producers: serving idle ones, and closing them."""

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


def test_an_idle_producer_gathers_nothing(cluster: Cluster) -> None:
    target = cluster.target(OutboxSettings())
    target.channel(target.topic(cluster.topic(partitions=1)), fresh=True)
    [producer] = target._producers().values()
    assert producer.has_id()
    producer.poll(0)
    _: Any = threading.Event().wait(1)  # the time in which something would gather
    assert len(producer) == 0


def test_an_idle_relay_serves_its_producers(
    postgres: Database, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = cluster.topic(partitions=1)
    maintained: list[int] = []
    maintain = KafkaTarget.maintain

    def counted(target: KafkaTarget) -> None:
        maintained.append(len(target._producers()))
        maintain(target)

    monkeypatch.setattr(KafkaTarget, "maintain", counted)
    with running(cluster.relay(postgres)) as relay:
        publish(postgres, topic, (b"k", b"1"))
        until(lambda: relay.metrics.counted("outbox_sent") == 1, "it is sent")
        maintained.clear()
        until(lambda: maintained.count(1) >= 2, "it was looked after twice", timeout_s=10)


def test_a_topic_that_takes_more_than_the_client_does_is_relayed(postgres: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1, max_message_bytes="2147483647")
    publish(postgres, topic, (b"k", b"1"))
    assert cluster.relay(postgres).run(once=True) == 1


def test_a_producer_that_cannot_be_made_lets_its_topic_rest_and_no_other(
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


def test_a_call_of_the_client_that_does_not_return_costs_its_topic_a_rest_and_no_more(
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
            until(lambda: postgres.waiting() == 0, "it went, with another producer")
            assert relay.metrics.counted("outbox_rests") == 1
    finally:
        go.set()
    assert [each.value for each in cluster.read(topic)] == [b"1", b"2"]


def test_no_more_producers_are_made_while_many_do_not_end(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cluster.target(OutboxSettings())
    topic = target.topic(cluster.topic(partitions=1))
    monkeypatch.setattr("tidebook.outbox.kafka.target.closing_count", lambda: CLOSING_MAX)
    with pytest.raises(Unavailable, match="are closing"):
        target.channel(topic, fresh=True)
