"""The rules that the relay depends on, each on a real PostgreSQL and a real Kafka."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition

from tests.integration.outbox.databases import Database
from tests.integration.outbox.owner import SHORT, Owner, short
from tests.integration.outbox.relaying import Cluster, opened_store, publish, relay_database, running, until
from tidebook import outbox
from tidebook.core.errors import Fenced
from tidebook.outbox import batch_selection as plan
from tidebook.outbox.fence import Fence
from tidebook.outbox.port import BatchOutcomeUnknown, BatchSent, RelaySession
from tidebook.outbox.postgres import TOPICS_WAITING
from tidebook.outbox.settings import OutboxSettings

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

FENCES = ["timestamp", "transaction"]


def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    return [each.value for each in cluster.read(topic)]


def ten() -> list[tuple[bytes, bytes]]:
    return [(b"k", str(n).encode()) for n in range(10)]


@pytest.mark.parametrize("fence", FENCES)
def test_rule_29_a_paused_owner_that_sends_late_is_fenced_by_the_broker(
    postgres: Database, cluster: Cluster, owners: Any, fence: str
) -> None:
    topic = cluster.topic()
    publish(postgres, topic, *ten())
    paused: Owner = owners(topic, short(fence))
    paused.wait_until_lost()
    assert cluster.relay(postgres, short(fence)).run(once=True) == 10
    outcome = paused.send()
    assert isinstance(outcome, BatchOutcomeUnknown)
    assert (outcome.late, outcome.suspect) == (fence == "timestamp", False), outcome.reason
    with pytest.raises(Fenced):
        paused.store.heartbeat(paused.hold)
    assert values(cluster, topic) == [value for _, value in ten()]


def test_rule_29_without_a_fence_a_late_send_repeats_messages_and_the_relay_reports_it(
    postgres: Database, cluster: Cluster, owners: Any
) -> None:
    topic = cluster.topic()
    publish(postgres, topic, *ten())
    paused: Owner = owners(topic, short("none"))
    paused.wait_until_lost()
    relay = cluster.relay(postgres, short("none"))
    relay.run(once=True)
    assert isinstance(paused.send(), BatchSent)
    assert len(values(cluster, topic)) == 20
    assert relay.metrics.counted("outbox_at_least_once", topic=topic, cause="weak") > 0
    with opened_store(postgres) as store:
        [status] = store.status(count_max=10)
    assert "fence = 'none'" in (status.notice or "")


def test_rule_29_a_topic_that_may_not_be_configured_is_at_least_once_with_a_reason(
    postgres: Database, cluster: Cluster
) -> None:
    topic, stamped = cluster.topic(), cluster.topic(message_timestamp_type="LogAppendTime")
    for each in (topic, stamped):
        publish(postgres, each, (b"k", b"x"))
    cluster.relay(postgres, OutboxSettings(configure_topics=False)).run(once=True)
    with opened_store(postgres) as store:
        notices = {each.topic: each.notice or "" for each in store.status(count_max=10)}
    assert "configure_topics is off" in notices[topic]
    assert "LogAppendTime" in notices[stamped]
    assert len(values(cluster, topic)) == len(values(cluster, stamped)) == 1


def test_rule_30_a_message_of_another_outbox_with_the_same_id_is_not_mistaken_for_its_own(
    postgres: Database, cluster: Cluster, owners: Any
) -> None:
    topic = cluster.topic(partitions=1)
    publish(postgres, topic, (b"k", b"mine"))
    dying: Owner = owners(topic)
    stranger = plan.to_relayed(dying.batch.messages, session=uuid.uuid4().bytes, outbox=uuid.uuid4().bytes)
    dying.channel.start(stranger, timestamp_ms=dying.batch.opened_ms)
    until(lambda: isinstance(dying.channel.wait(1.0), BatchSent), "the other outbox's message is in the log")
    dying.wait_until_lost()
    assert cluster.relay(postgres, SHORT).run(once=True) == 1
    assert len(values(cluster, topic)) == 2


@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("sent", [0, 4, 10])
def test_rule_31_what_a_dead_owner_sent_is_found_and_the_rest_follows_in_order(
    postgres: Database, cluster: Cluster, owners: Any, fence: str, sent: int
) -> None:
    topic = cluster.topic()
    publish(postgres, topic, *ten())
    dead: Owner = owners(topic, short(fence))
    if sent:
        assert isinstance(dead.send(sent), BatchSent)
    dead.wait_until_lost()
    relay = cluster.relay(postgres, short(fence))
    assert relay.run(once=True) == 10 - sent
    assert relay.metrics.counted("outbox_found") == sent
    assert values(cluster, topic) == [value for _, value in ten()]
    assert postgres.waiting() == 0


def test_rule_31_an_open_session_is_scanned_for_only_when_it_can_no_longer_arrive(
    postgres: Database, cluster: Cluster, owners: Any
) -> None:
    """The owner released the lock immediately; its batch may still arrive until the fence's time has passed."""
    topic = cluster.topic()
    publish(postgres, topic, *ten())
    hasty: Owner = owners(topic)
    hasty.store.unlock(hasty.hold)
    relay = cluster.relay(postgres, SHORT)
    assert relay.run(once=True) == 0
    assert isinstance(hasty.send(), BatchSent)
    with running(cluster.relay(postgres, SHORT)) as later:
        until(lambda: later.metrics.counted("outbox_found") == 10, "the batch was found")
        until(lambda: postgres.waiting() == 0, "its messages are deleted")
    assert len(values(cluster, topic)) == 10


def test_rule_31_a_recreated_topic_is_at_least_once_and_reported(
    postgres: Database, cluster: Cluster, owners: Any
) -> None:
    topic = cluster.topic()
    publish(postgres, topic, *ten())
    dead: Owner = owners(topic)
    assert isinstance(dead.send(), BatchSent)
    cluster.admin.delete_topics([topic])[topic].result(30)
    until(lambda: topic not in cluster.admin.list_topics(timeout=10).topics, "the topic is deleted")
    cluster.make(topic)
    dead.wait_until_lost()
    relay = cluster.relay(postgres, SHORT)
    assert relay.run(once=True) == 10
    assert relay.metrics.counted("outbox_at_least_once", cause="lost") == 1
    with opened_store(postgres) as store:
        [status] = store.status(count_max=10)
    assert "re-created" in (status.notice or "")
    assert len(values(cluster, topic)) == 10


def test_rule_31_a_log_that_begins_after_the_session_is_at_least_once_and_reported(
    postgres: Database, cluster: Cluster, owners: Any
) -> None:
    topic = cluster.topic(partitions=1)
    publish(postgres, topic, *ten())
    dead: Owner = owners(topic)
    assert isinstance(dead.send(), BatchSent)
    cluster.admin.delete_records([TopicPartition(topic, 0, 6)])[TopicPartition(topic, 0)].result(30)
    dead.wait_until_lost()
    relay = cluster.relay(postgres, SHORT)
    assert relay.run(once=True) == 6
    with opened_store(postgres) as store:
        [status] = store.status(count_max=10)
    assert "now starts after" in (status.notice or "")
    assert sorted(values(cluster, topic)) == sorted(value for _, value in ten())  # type: ignore[type-var]


def test_rule_31_a_lost_owner_deletes_nothing(postgres: Database, cluster: Cluster, owners: Any) -> None:
    topic = cluster.topic()
    publish(postgres, topic, *ten())
    lost: Owner = owners(topic)
    assert isinstance(lost.send(), BatchSent)
    lost.wait_until_lost()
    with opened_store(postgres, SHORT) as other:
        assert other.try_lock(topic, lock_id=uuid.uuid4().bytes, owner="another") is not None
        finished = [row.id for row in lost.batch.messages]
        with pytest.raises(Fenced):
            lost.store.finish(lost.hold, finished, unlock=True)
    assert postgres.waiting() == 10


def test_rule_31_a_scan_stops_early_when_all_is_found(postgres: Database, cluster: Cluster, owners: Any) -> None:
    topic = cluster.topic(partitions=1)
    publish(postgres, topic, *ten())
    owner: Owner = owners(topic, OutboxSettings())
    owner.send()
    ends = owner.target.ends(owner.topic)
    for _ in range(5):
        owner.channel.start(
            plan.to_relayed(owner.batch.messages * 100, session=uuid.uuid4().bytes, outbox=owner.identity),
            timestamp_ms=int(owner.store._rows("SELECT extract(epoch FROM now()) * 1000")[0][0]),
        )
        until(lambda: isinstance(owner.channel.wait(1.0), BatchSent), "the noise is in the log")
    steps: list[None] = []
    ids = frozenset(row.id for row in owner.batch.messages)
    scan = RelaySession(owner.batch.session, ids, 0, Fence.TIMESTAMP, owner.topic.uuid, {0: ends[0] - 10})
    assert owner.target.scan(owner.topic, scan, lambda: steps.append(None)).ids == ids
    assert len(steps) < 20


def test_rule_32_a_lock_covers_one_topic(postgres: Database) -> None:
    with opened_store(postgres, SHORT) as store, opened_store(postgres, SHORT) as other:
        assert store.try_lock("a", lock_id=uuid.uuid4().bytes, owner="one") is not None
        assert other.try_lock("b", lock_id=uuid.uuid4().bytes, owner="two") is not None
        assert other.try_lock("a", lock_id=uuid.uuid4().bytes, owner="two") is None


def test_rule_32_a_topic_that_failed_rests_and_is_taken_again(postgres: Database) -> None:
    with opened_store(postgres, SHORT) as store:
        hold = store.try_lock("a", lock_id=uuid.uuid4().bytes, owner="one")
        assert hold is not None
        store.rest(hold, reason="it failed", rest_ms=300)
        assert store.try_lock("a", lock_id=uuid.uuid4().bytes, owner="one") is None
        [status] = store.status(count_max=10)
        assert (status.error, status.retries, status.reason) == (True, 1, "it failed")
        until(lambda: store.try_lock("a", lock_id=uuid.uuid4().bytes, owner="one"), "the rest is over")


@pytest.mark.parametrize("off_s", [60, -60])
def test_rule_32_database_time_decides_and_not_a_relays_clock(
    postgres: Database, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, off_s: int
) -> None:
    """A relay whose clock is a minute off neither takes a lock early nor stamps messages with its own time."""
    import time

    topic = cluster.topic(partitions=1)
    publish(postgres, topic, *ten())
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + off_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + off_s * 1_000_000_000)
    with opened_store(postgres) as store:
        held = store.try_lock(topic, lock_id=uuid.uuid4().bytes, owner="another")
        assert held is not None
        assert cluster.relay(postgres).run(once=True) == 0
        store.unlock(held)
    assert cluster.relay(postgres).run(once=True) == 10
    assert all(abs(each.timestamp_ms - real() * 1000) < 30_000 for each in cluster.read(topic))


def test_rule_33_later_messages_never_overtake_a_refused_one(postgres: Database, cluster: Cluster, owners: Any) -> None:
    """Kafka refuses the third message; without the gapless guarantee the fourth to tenth would be in the log."""
    topic = cluster.topic(partitions=1)
    publish(postgres, topic, *ten()[:2], (b"k", b"x" * 50_000), *ten()[3:])
    owner: Owner = owners(topic)
    _limit(cluster, topic, 20_000)
    outcome = owner.send()
    assert isinstance(outcome, BatchOutcomeUnknown)
    assert outcome.suspect
    owner.channel.drop()
    assert values(cluster, topic) in ([], [b"0"], [b"0", b"1"])


def test_rule_33_the_refused_message_is_found_and_parked_and_the_others_are_sent(
    postgres: Database, cluster: Cluster
) -> None:
    """The limit shrinks while the relay has cached the old one: the broker refuses a message that seemed to fit."""
    topic = cluster.topic(partitions=1)
    publish(postgres, topic, (b"k", b"first"))
    with running(cluster.relay(postgres, SHORT)) as relay:
        until(lambda: relay.metrics.counted("outbox_sent") == 1, "the topic is known")
        _limit(cluster, topic, 20_000)
        publish(postgres, topic, (b"k", b"0"), (b"big", b"x" * 50_000), (b"k", b"1"), (b"big", b"later"), (b"k", b"2"))
        until(lambda: postgres.waiting() == 0, "the others are sent")
    assert values(cluster, topic) == [b"first", b"0", b"1", b"2"]
    with opened_store(postgres) as store:
        parked = store.parked(topic, limit=10)
    assert [(each.state, each.key) for each in parked] == [("parked", b"big"), ("held", b"big")]


def test_rule_33_a_message_that_no_segment_can_hold_is_parked(postgres: Database, cluster: Cluster) -> None:
    """Kafka has two limits, and reports each by a separate error."""
    topic = cluster.topic(partitions=1, max_message_bytes="5000000")
    small = cluster.topic(partitions=1, max_message_bytes="5000000", segment_bytes="1048576")
    large = b"x" * 2_000_000
    publish(postgres, topic, (b"k", b"first"))
    with running(cluster.relay(postgres, SHORT)) as relay:
        until(lambda: relay.metrics.counted("outbox_sent") == 1, "the topic is known")
        _limit(cluster, topic, 1_048_576, "segment.bytes")
        for each in (topic, small):
            publish(postgres, each, (b"big", large), (b"k", b"1"))
        until(lambda: postgres.waiting() == 0, "the others are sent")
    assert values(cluster, topic) == [b"first", b"1"]
    assert values(cluster, small) == [b"1"]
    with opened_store(postgres) as store:
        assert sorted((each.topic, each.state) for each in store.parked(None, limit=10)) == sorted(
            [(topic, "parked"), (small, "parked")]
        )


def test_rule_33_an_unknown_topic_rests_and_never_parks(postgres: Database, cluster: Cluster) -> None:
    topic = f"outbox-{uuid.uuid4().hex[:12]}"
    publish(postgres, topic, (b"k", b"x"))
    with running(cluster.relay(postgres, SHORT)) as relay:
        until(lambda: relay.metrics.counted("outbox_rests") >= 2, "the topic was tried twice")
        with opened_store(postgres) as store:
            [status] = store.status(count_max=10)
            assert "does not exist" in (status.reason or "")
            assert store.parked(None, limit=10) == []
        cluster.make(topic)
        until(lambda: relay.metrics.counted("outbox_sent") == 1, "the message is sent")


def test_rule_35_finding_topics_reads_few_index_entries_per_topic(postgres: Database, cluster: Cluster) -> None:
    names = [f"t{n:02}" for n in range(20)]
    with postgres.connect() as connection:
        for name in names:
            connection.execute(
                "INSERT INTO kafka_messages (topic, payload) SELECT %s, '' FROM generate_series(1, 2000)", (name,)
            )
        connection.commit()
        connection.execute("ANALYZE kafka_messages")
        connection.commit()
    with opened_store(postgres) as store, postgres.connect() as connection:
        found: set[str] = set()
        while fresh := set(store.topics_waiting()) - found:  # each call finds one more unknown topic
            for topic in fresh:
                hold = store.try_lock(topic, lock_id=uuid.uuid4().bytes, owner="test")
                assert hold is not None
                store.unlock(hold)
            found |= fresh
        assert found == set(names)
        query = "EXPLAIN (ANALYZE, FORMAT JSON) " + TOPICS_WAITING
        [[plan_]] = connection.execute(query, ([], [], [], 1000, 1000)).fetchall()
    rows = sum(_scanned(node) for node in _nodes(plan_[0]["Plan"]) if node.get("Relation Name") == "kafka_messages")
    assert rows <= 3 * len(names) + 10, json.dumps(plan_)[:2000]


def test_rule_35_under_a_held_snapshot_a_batch_continues_after_the_last_one(
    postgres: Database, cluster: Cluster
) -> None:
    """Late commits are still sent: the floor waits for every transaction that may have taken a lower id."""
    topic = cluster.topic(partitions=1)
    publish(postgres, topic, *((b"k", str(n).encode()) for n in range(400)))
    database = relay_database(postgres, OutboxSettings())
    with postgres.connect() as reader, postgres.connect() as late, psycopg.connect(postgres.url) as other:
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM kafka_messages")
        settings = OutboxSettings(batch_rows=20)
        relay_again(cluster, postgres, database, settings)

        def risen() -> bool:
            """Return whether the floor has risen: it also waits for transactions in other databases of the server."""
            publish(postgres, topic, (b"k", b"more"))
            relay_again(cluster, postgres, database, settings)
            floors: list[int] = database._floors.known()[1]  # type: ignore[attr-defined]
            assert len(floors) <= 1
            return floors != [] and floors[0] >= 300

        until(risen, "the floor follows what was relayed")
        # A late writer keeps the floor from rising until it has ended.
        outbox.publish(late, topic=topic, key=b"k", payload=b"late")
        outbox.publish_list(other, [outbox.Message(topic, b"after", key=b"k")] * 100)
        other.commit()
        assert relay_again(cluster, postgres, database, settings) == 100
        late.commit()
        publish(postgres, topic, (b"k", b"last"))
        assert relay_again(cluster, postgres, database, settings) == 2
    assert values(cluster, topic)[-2:] == [b"late", b"last"]


def relay_again(cluster: Cluster, postgres: Database, database: Any, settings: OutboxSettings) -> int:
    relay = cluster.relay(postgres, settings)
    relay._database = database
    return relay.run(once=True)


def _nodes(plan_: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan_
    for inner in plan_.get("Plans", []):
        yield from _nodes(inner)


def _scanned(node: dict[str, Any]) -> float:
    return float(node["Actual Loops"]) * (float(node["Actual Rows"]) + float(node.get("Rows Removed by Filter", 0)))


def _limit(cluster: Cluster, topic: str, limit_bytes: int, name: str = "max.message.bytes") -> None:
    from confluent_kafka.admin import (  # type: ignore[attr-defined]
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
    )

    entry = ConfigEntry(name, str(limit_bytes), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    [future] = cluster.admin.incremental_alter_configs([resource]).values()
    future.result(30)

    def limit() -> str:
        [asked] = cluster.admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)]).values()
        return str(asked.result(30)[name].value)

    until(lambda: limit() == str(limit_bytes), "the broker knows the limit")
