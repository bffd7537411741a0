"""Messages that Kafka never accepts are parked with a reason, and hold only later messages of their key."""

from __future__ import annotations

import pytest

from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import Cluster, opened_store, publish, running, until
from tidebook.core.errors import NotFound
from tidebook.outbox.port import ParkedMessage
from tidebook.outbox.settings import OutboxSettings

every_database = pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)
pytestmark = pytest.mark.kafka

LARGE = b"x" * 10_000_000


def parked_messages(database: Database) -> list[ParkedMessage]:
    with opened_store(database) as store:
        return store.parked(None, limit=100)


@every_database
def test_a_message_of_ten_megabytes_is_sent_if_the_topic_accepts_it(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1, max_message_bytes="20000000")
    publish(database, topic, (b"k", b"before"), (b"k", LARGE), (b"k", b"after"))
    assert cluster.relay(database).run(once=True) == 3
    assert [each.value for each in cluster.read(topic)] == [b"before", LARGE, b"after"]


@every_database
def test_a_message_that_is_too_large_is_parked_and_the_others_are_sent(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1)
    publish(database, topic, (b"a", b"1"), (b"big", LARGE), (b"b", b"2"), (None, LARGE), (None, b"3"), (b"a", b"4"))
    assert cluster.relay(database).run(once=True) == 4
    assert [each.value for each in cluster.read(topic)] == [b"1", b"2", b"3", b"4"]
    parked = parked_messages(database)
    assert [(each.state, each.key, each.size_bytes, each.tries) for each in parked] == [
        ("parked", b"big", 10_000_000, 1),
        ("parked", None, 10_000_000, 1),
    ]
    assert "10,000," in parked[0].reason
    assert "max.message.bytes" in parked[0].reason
    with opened_store(database) as store:
        [status] = store.status(count_max=10)
    assert (status.waiting, status.parked, status.held, status.error) == (0, 2, 0, False)


@every_database
def test_a_parked_message_holds_its_key_until_it_is_dropped(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1)
    publish(database, topic, (b"k", LARGE), (b"k", b"2"), (b"other", b"3"))
    relay = cluster.relay(database)
    assert relay.run(once=True) == 1
    publish(database, topic, (b"k", b"4"))
    assert cluster.relay(database).run(once=True) == 0
    assert [each.state for each in parked_messages(database)] == ["parked", "held", "held"]
    with opened_store(database) as store:
        [parked, *_] = store.parked(topic, limit=1)
        assert store.parked_drop(topic, parked.id) == 1
    publish(database, topic, (b"k", b"5"))
    assert cluster.relay(database).run(once=True) == 3
    assert [each.value for each in cluster.read(topic)] == [b"3", b"2", b"4", b"5"]
    assert parked_messages(database) == []


@every_database
def test_a_retried_message_is_sent_in_order_when_the_topic_accepts_it(database: Database, cluster: Cluster) -> None:
    from tests.integration.outbox.test_rules import _limit

    topic = cluster.topic(partitions=1, max_message_bytes="20000")
    publish(database, topic, (b"k", b"x" * 50_000), (b"k", b"2"))
    cluster.relay(database).run(once=True)
    _limit(cluster, topic, 1_000_000)
    with opened_store(database) as store:
        assert store.parked_retry(topic, None) == 1
    publish(database, topic, (b"k", b"3"))
    assert cluster.relay(database).run(once=True) == 3
    assert [each.value for each in cluster.read(topic)] == [b"x" * 50_000, b"2", b"3"]


@every_database
def test_under_the_skip_policy_later_messages_of_the_key_pass(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1)
    publish(database, topic, (b"k", LARGE), (b"k", b"2"))
    assert cluster.relay(database, OutboxSettings(parked="skip")).run(once=True) == 1
    assert [each.value for each in cluster.read(topic)] == [b"2"]
    assert [each.state for each in parked_messages(database)] == ["parked"]


@every_database
@pytest.mark.parametrize("policy", ["hold_key", "skip"])
def test_a_message_is_parked_after_the_configured_number_of_attempts(
    database: Database, cluster: Cluster, policy: str
) -> None:
    topic = cluster.topic(partitions=1)
    publish(database, topic, (b"k", LARGE), (b"k", b"2"), (b"other", b"3"))
    settings = OutboxSettings(park_after_tries=3, rest_s=0.3, poll_s=0.1, parked=policy)  # type: ignore[arg-type]
    with running(cluster.relay(database, settings)) as relay:
        until(lambda: relay.metrics.counted("outbox_sent") == 1, "the other key is not held up")
        assert {each.state for each in parked_messages(database)} <= {"retrying", "held", "parked"}
        until(lambda: any(each.state == "parked" for each in parked_messages(database)), "the message is parked")
        if policy == "skip":
            until(lambda: relay.metrics.counted("outbox_sent") == 2, "the message that it held is sent")
    [parked, *held] = parked_messages(database)
    assert (parked.state, parked.tries) == ("parked", 3)
    assert [each.state for each in held] == ([] if policy == "skip" else ["held"])


@every_database
def test_a_message_without_a_key_is_parked_if_the_topic_is_compacted(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1, cleanup_policy="compact")
    publish(database, topic, (None, b"1"), (b"k", b"2"))
    assert cluster.relay(database).run(once=True) == 1
    [parked] = parked_messages(database)
    assert "compacted" in parked.reason


@every_database
def test_only_a_parked_message_can_be_retried_or_dropped(database: Database) -> None:
    with opened_store(database) as store:
        with pytest.raises(NotFound):
            store.parked_retry("orders", 7)
        with pytest.raises(NotFound):
            store.parked_drop("orders", 7)
        assert store.parked_drop("orders", None) == 0


@every_database
def test_invalid_rows_of_another_program_stop_no_other_message(database: Database, cluster: Cluster) -> None:
    """Invalid headers are parked; a topic with an invalid name rests; other messages are sent."""
    topic = cluster.topic(partitions=1)
    with database.connect() as connection:
        cursor = connection.cursor()
        mark = database.placeholder
        for name, headers in ((topic, b"\xc1\xff"), (topic, b"\x93\x01\x02\x03"), ("no topic!", None)):
            sql = f"INSERT INTO kafka_messages (topic, payload, headers) VALUES ({mark}, {mark}, {mark})"
            cursor.execute(sql, (name, b"wrong", headers))
        connection.commit()
    publish(database, topic, (b"k", b"right"))
    assert cluster.relay(database).run(once=True) == 1
    assert [each.value for each in cluster.read(topic)] == [b"right"]
    assert ["headers are not" in each.reason for each in parked_messages(database)] == [True, True]
    with opened_store(database) as store:
        [rests] = [each for each in store.status(count_max=10) if each.error]
    assert (rests.topic, rests.waiting) == ("no topic!", 1)
