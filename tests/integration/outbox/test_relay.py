"""The relay on every database: every committed message arrives once, in order and unchanged."""

from __future__ import annotations

import threading

import pytest

from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import Cluster, opened_store, publish, running, until
from tidebook import outbox
from tidebook.outbox import Message
from tidebook.outbox.kafka.producer import choose_partition
from tidebook.outbox.port import ID_HEADER, SESSION_HEADER
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.sql import SQL, dialect

every_database = pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)
pytestmark = pytest.mark.kafka


@every_database
def test_committed_messages_arrive_unchanged(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic()
    with database.connect() as connection:
        outbox.publish(connection, topic=topic, key=b"k", payload=b"\x00\xff", headers={"kind": b"paid", "none": None})
        outbox.publish(connection, topic=topic, key=b"k", payload=None)
        connection.commit()
    assert cluster.relay(database).run(once=True) == 2
    first, second = cluster.read(topic)
    assert (first.key, first.value, first.headers["kind"]) == (b"k", b"\x00\xff", b"paid")
    assert first.headers["none"] is None
    assert second.value is None
    assert first.partition == second.partition == choose_partition(b"k", 3)
    assert database.waiting() == 0


@every_database
@pytest.mark.parametrize("fence", ["timestamp", "transaction", "none"])
def test_many_batches_arrive_once_and_in_order(database: Database, cluster: Cluster, fence: str) -> None:
    topic = cluster.topic()
    messages = [(str(n % 17).encode(), str(n).encode()) for n in range(2_345)]
    publish(database, topic, *messages)
    settings = OutboxSettings(fence=fence, batch_rows=500)  # type: ignore[arg-type]
    assert cluster.relay(database, settings).run(once=True) == len(messages)
    seen = cluster.read(topic)
    assert sorted(int(each.value or b"") for each in seen) == list(range(len(messages)))
    for key in {each.key for each in seen}:
        values = [int(each.value or b"") for each in seen if each.key == key]
        assert values == sorted(values)
    assert database.waiting() == 0


@every_database
def test_a_partition_key_chooses_the_partition_and_leaves_the_key(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=5)
    with database.connect() as connection:
        for n in range(20):
            outbox.publish(connection, topic=topic, key=str(n).encode(), partition_key=b"customer", payload=b"x")
        connection.commit()
    cluster.relay(database).run(once=True)
    seen = cluster.read(topic)
    assert {each.partition for each in seen} == {choose_partition(b"customer", 5)}
    assert [each.key for each in seen] == [str(n).encode() for n in range(20)]


@every_database
def test_rule_30_a_message_carries_its_session_and_its_outbox(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1)
    publish(database, topic, (b"k", b"one"), (b"k", b"two"))
    cluster.relay(database).run(once=True)
    one, two = cluster.read(topic)
    with opened_store(database) as store:
        identity = store.identity()
    assert one.headers[ID_HEADER][:16] == identity
    assert one.headers[SESSION_HEADER][:16] == two.headers[SESSION_HEADER][:16]
    assert int.from_bytes(two.headers[ID_HEADER][16:], "big") == int.from_bytes(one.headers[ID_HEADER][16:], "big") + 1
    assert one.headers[SESSION_HEADER][16:] == one.headers[ID_HEADER][16:]


@every_database
def test_a_running_relay_sends_later_messages(database: Database, cluster: Cluster) -> None:
    topics = [cluster.topic(partitions=1) for _ in range(3)]
    with running(cluster.relay(database, OutboxSettings(threads=2))) as relay:
        for n in range(5):
            for topic in topics:
                publish(database, topic, (b"k", str(n).encode()))
            until(lambda n=n: relay.metrics.counted("outbox_sent") == 3 * (n + 1), "all are sent")  # type: ignore[misc]
    for topic in topics:
        assert [each.value for each in cluster.read(topic)] == [str(n).encode() for n in range(5)]


@every_database
def test_two_relays_share_a_topic_without_sending_anything_twice(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic()
    settings = OutboxSettings(batch_rows=50, hold_batches_max=2, threads=2)
    count = 3_000
    with running(cluster.relay(database, settings)) as one, running(cluster.relay(database, settings)) as two:
        for start in range(0, count, 300):
            publish(database, topic, *((str(n % 5).encode(), str(n).encode()) for n in range(start, start + 300)))

        def sent() -> float:
            return one.metrics.counted("outbox_sent") + two.metrics.counted("outbox_sent")

        until(lambda: sent() >= count, "all are sent")
    values = [int(each.value or b"") for each in cluster.read(topic)]
    assert sorted(values) == list(range(count))
    by_key = {key: [int(e.value or b"") for e in cluster.read(topic) if e.key == key] for key in (b"0", b"3")}
    assert all(found == sorted(found) for found in by_key.values())


@pytest.mark.parametrize(
    "empty_database", [each for each in EVERY_DATABASE if each.values != ("sqlite",)], indirect=True
)
def test_rule_34_a_late_commit_is_sent_before_messages_of_transactions_that_began_after_it(
    database: Database, cluster: Cluster
) -> None:
    """T1 takes id 1 and commits late; T3 begins after T1's commit, so T1's message is sent first. No row is skipped."""
    topic = cluster.topic(partitions=1)
    with database.connect() as late:
        outbox.publish(late, topic=topic, key=b"k", payload=b"late")
        publish(database, topic, *((b"k", str(n).encode()) for n in range(30)))
        with running(cluster.relay(database, OutboxSettings(batch_rows=5))) as relay:
            until(lambda: relay.metrics.counted("outbox_sent") == 30, "the earlier ones are sent")
            late.commit()
            publish(database, topic, (b"k", b"after"))
            until(lambda: relay.metrics.counted("outbox_sent") == 32, "the late one is sent")
    values = [each.value for each in cluster.read(topic)]
    assert values == [*(str(n).encode() for n in range(30)), b"late", b"after"]


@every_database
def test_stopping_releases_the_topic(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic()
    with running(cluster.relay(database, OutboxSettings(batch_rows=20))) as relay:
        publish(database, topic, *((None, b"x") for _ in range(2_000)))
        until(lambda: relay.metrics.counted("outbox_sent") > 0, "some are sent")
    [status] = _status(database)
    assert status.locked_by is None
    assert not status.dirty
    assert len(cluster.read(topic)) + database.waiting() == 2_000


def _status(database: Database):  # type: ignore[no-untyped-def]
    with opened_store(database) as store:
        return store.status(count_max=10_000)


@every_database
def test_status_reports_the_true_age_of_the_oldest_row(database: Database, cluster: Cluster) -> None:
    topic, other = cluster.topic(), cluster.topic()
    publish(database, topic, (b"k", b"old"), (b"k", b"new"))
    threading.Event().wait(0.05)
    waiting, idle = sorted(_status(database), key=lambda each: each.waiting, reverse=True)[0], None
    assert (waiting.topic, waiting.waiting, waiting.locked_by) == (topic, 2, None)
    assert 50 <= (waiting.oldest_age_ms or 0) < 60_000
    cluster.relay(database).run(once=True)
    publish(database, other, (b"k", b"x"))
    by_topic = {each.topic: each for each in _status(database)}
    idle = by_topic[topic]
    assert (idle.waiting, idle.oldest_age_ms, idle.relayed, idle.error, idle.retries) == (0, None, 2, False, 0)
    assert idle.per_minute in {1, 2}  # the share of the previous minute depends on the current second
    assert by_topic[other].waiting == 1


@every_database
def test_messages_sent_before_the_full_minute_count_in_the_rate_of_the_last_minute(
    database: Database, cluster: Cluster
) -> None:
    topic = cluster.topic()
    publish(database, topic, (b"k", b"only"))
    cluster.relay(database).run(once=True)
    reported = []
    for _ in range(2):  # the minute may change between the two statements, but not twice
        database.query(f"UPDATE kafka_topic_info SET minute = {SQL[dialect(database.kind)].minute} - 1")
        reported.append(_status(database)[0].per_minute)
    assert 1 in reported


@every_database
def test_sqlalchemy_wakes_a_relay_of_its_own_process_at_once(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1)
    publish(database, topic, (b"k", b"first"))
    with running(cluster.relay(database, OutboxSettings(poll_s=30))) as relay:
        until(lambda: relay.metrics.counted("outbox_sent") == 1, "the first is sent")
        with database.connect() as connection:
            outbox.publish_list(connection, [Message(topic, b"second", key=b"k")])
            connection.commit()
        until(lambda: relay.metrics.counted("outbox_sent") == 2, "the second is sent without a poll", timeout_s=10)
