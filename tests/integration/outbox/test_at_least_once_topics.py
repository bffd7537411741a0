"""Topics without exactly-once delivery: what a scan finds, which notice is stored, and when it is cleared."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from tests.integration.outbox.databases import Database
from tests.integration.outbox.owner import SHORT, Owner
from tests.integration.outbox.relaying import Cluster, opened_store, publish, until
from tidebook.core.errors import Unavailable
from tidebook.outbox.port import BatchSent
from tidebook.outbox.settings import OutboxSettings

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def notice(database: Database) -> str | None:
    with opened_store(database) as store:
        [status] = store.status(count_max=10)
    return status.notice


def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    return [each.value for each in cluster.read(topic)]


def send_only(owner: Owner, index: int) -> None:
    """Send one message only, as if the earlier ones had been deleted from the log."""
    owner.channel.start(owner.messages()[index : index + 1], timestamp_ms=owner.batch.opened_ms)
    while (outcome := owner.channel.wait(1.0)) is None:
        pass
    assert isinstance(outcome, BatchSent)


@contextmanager
def transaction(cluster: Cluster, topic: str) -> Iterator[Producer]:
    """Keep another producer's transaction open during the block, and abort it at the end."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"a stranger", b"s")
    producer.flush(30)
    try:
        yield producer
    finally:
        producer.abort_transaction(30)


def test_a_found_message_proves_the_earlier_ones_of_its_key_on_a_compacted_topic(
    postgres: Database, cluster: Cluster, owners: Any
) -> None:
    """If the older one were sent again, its value would be the last one of the key."""
    topic = cluster.topic(partitions=3, cleanup_policy="compact")
    publish(postgres, topic, (b"k", b"1"), (b"k", b"2"))
    dead: Owner = owners(topic)
    send_only(dead, 1)
    dead.wait_until_lost()
    relay = cluster.relay(postgres, SHORT)
    assert relay.run(once=True) == 0
    assert relay.metrics.counted("outbox_found") == 2
    assert values(cluster, topic) == [b"2"]
    assert postgres.waiting() == 0
    assert notice(postgres) is None


def test_messages_missing_from_a_compacted_topic_with_holes_are_at_least_once(
    postgres: Database, cluster: Cluster, owners: Any
) -> None:
    topic = cluster.topic(partitions=1, cleanup_policy="compact")
    publish(postgres, topic, (b"a", b"1"), (b"b", b"2"))
    dead: Owner = owners(topic)
    with transaction(cluster, topic):
        pass  # its marker takes an offset, like a message that was compacted away
    send_only(dead, 1)
    dead.wait_until_lost()
    relay = cluster.relay(postgres, SHORT)
    assert relay.run(once=True) == 1
    assert relay.metrics.counted("outbox_at_least_once", cause="lost") == 1
    assert "is compacted" in (notice(postgres) or "")


def test_another_producers_open_transaction_does_not_stop_the_scan_for_a_session(
    postgres: Database, cluster: Cluster, owners: Any
) -> None:
    topic = cluster.topic(partitions=1)
    publish(postgres, topic, *((b"k", str(n).encode()) for n in range(10)))
    dead: Owner = owners(topic)
    with transaction(cluster, topic):
        assert isinstance(dead.send(4), BatchSent)
        dead.wait_until_lost()
        relay = cluster.relay(postgres, SHORT)
        assert relay.run(once=True) == 6
        assert relay.metrics.counted("outbox_found") == 4
    sent = [str(n).encode() for n in range(10)]
    until(lambda: values(cluster, topic) == sent, "the end of the aborted transaction no longer hides the messages")


def test_a_notice_is_cleared_when_the_fence_is_in_force_and_reported_once_while_it_is_not(
    postgres: Database, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    topic = cluster.topic(partitions=1)
    relay = cluster.relay(postgres, OutboxSettings(configure_topics=False, hold_batches_max=1, batch_rows=1))
    publish(postgres, topic, *[(b"k", b"1")] * 3)
    assert relay.run(once=True) == 3
    assert "configure_topics is off" in (notice(postgres) or "")
    assert relay.metrics.counted("outbox_at_least_once", cause="weak") >= 3
    assert sum("at least once" in each.message for each in caplog.records) == 1
    publish(postgres, topic, (b"k", b"1"))
    assert cluster.relay(postgres).run(once=True) == 1
    assert notice(postgres) is None


@pytest.mark.parametrize(
    ("code", "weak"),
    [
        (KafkaError._TIMED_OUT, False),
        (KafkaError._ALL_BROKERS_DOWN, False),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, True),
        (KafkaError.POLICY_VIOLATION, True),
    ],
)
def test_a_topic_is_relayed_without_a_fence_only_after_a_refusal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, code: int, weak: bool
) -> None:
    """If Kafka does not answer, the topic rests: otherwise it would be relayed without a fence for a minute."""
    target = cluster.target(OutboxSettings())
    topic = cluster.topic(partitions=1)
    failed: Future[None] = Future()
    failed.set_exception(KafkaException(KafkaError(code)))

    class Admin:
        def __getattr__(self, name: str) -> Any:
            return getattr(cluster.admin, name)

        def incremental_alter_configs(self, resources: Any) -> Any:
            return {resources[0]: failed}

    monkeypatch.setattr(target, "_admin", Admin())
    if weak:
        assert target.topic(topic).fence == "none"
    else:
        with pytest.raises(Unavailable):
            target.topic(topic)
