"""Status, refused sends, the cleanup after killed relays, and relays that lose their lock, on real servers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import Cluster, opened_store, publish, relay_database
from tidebook.core.errors import Fenced, NotFound
from tidebook.kafka.settings import KafkaSettings
from tidebook.outbox import Message
from tidebook.outbox.fence import Fence
from tidebook.outbox.kafka.sender import KafkaSender
from tidebook.outbox.port import BatchLimit, BatchSelection, MessageBatch, NewSession, TopicLock
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.store import OutboxStore
from tidebook.runtime.metrics import Metrics

pytestmark = [pytest.mark.kafka]


@pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)
def test_messages_held_by_a_parked_message_count_as_waiting(database: Database, cluster: Cluster) -> None:
    topic = cluster.topic(partitions=1, max_message_bytes="20000")
    publish(database, topic, (b"k", b"x" * 50_000), (b"k", b"held"))
    cluster.relay(database).run(once=True)
    with opened_store(database) as store:
        [status] = store.status(count_max=10)
        assert (status.waiting, status.parked, status.held) == (0, 1, 1)
        assert status.oldest_age_ms is not None
        store.parked_drop(topic, None)
    cluster.relay(database).run(once=True)
    with opened_store(database) as store:
        [status] = store.status(count_max=10)
    assert status.oldest_age_ms is None


def test_nothing_is_sent_if_one_topic_of_a_list_is_missing(cluster: Cluster) -> None:
    topic, missing = cluster.topic(partitions=1), f"outbox-{uuid.uuid4().hex[:12]}"
    sender = KafkaSender(KafkaSettings.read(f"kafka://{cluster.bootstrap}"), Metrics())
    with pytest.raises(NotFound):
        sender.send([Message(topic, b"1"), Message(missing, b"2")], wait=True)
    sender.close()
    assert cluster.read(topic) == []


@pytest.mark.postgres
def test_a_listener_removes_relays_that_were_killed(postgres: Database) -> None:
    ages = {"1 hour": uuid.uuid4(), "1 second": uuid.uuid4()}
    for age, relay in ages.items():
        postgres.query(f"INSERT INTO kafka_wake VALUES ('{relay}', now() - interval '{age}')")
    listener: Any = relay_database(postgres, OutboxSettings()).listen()
    listener.close()
    assert postgres.query("SELECT relay FROM kafka_wake") == [(ages["1 second"],)]


@pytest.mark.postgres
def test_reading_the_status_leaves_the_floors_unchanged(postgres: Database) -> None:
    database: Any = relay_database(postgres, OutboxSettings())
    database.connect().close()
    database._floors.of("orders", 0).at = 90
    database.connect().close()
    assert database._floors.known()[1] == [90]
    postgres.query("TRUNCATE kafka_messages")
    database.connect().close()
    assert database._floors.known()[1] == []


CALLS: dict[str, Callable[[OutboxStore, TopicLock], object]] = {
    "heartbeat": lambda store, lock: store.heartbeat(lock),
    "finish": lambda store, lock: store.finish(lock, [1, 2], unlock=False),
    "finish and unlock": lambda store, lock: store.finish(lock, [1, 2], unlock=True),
    "delete sent": lambda store, lock: store.delete_sent(lock, [1, 2]),
    "begin": lambda store, lock: begin(store, lock, sent=[1, 2]),
}


def begin(store: OutboxStore, lock: TopicLock, sent: Sequence[int] = ()) -> MessageBatch:
    session = NewSession(uuid.uuid4().bytes, Fence.NONE, "t", {0: 7})
    return store.begin(lock, session, lambda rows, _: BatchSelection(tuple(rows)), BatchLimit(), sent)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)
def test_a_relay_that_loses_its_lock_while_it_waits_for_the_topic_changes_nothing(
    database: Database, call: str
) -> None:
    publish(database, "t", *[(b"k", b"%d" % n) for n in range(5)])
    with opened_store(database) as store, database.connect() as other, ThreadPoolExecutor(1) as pool:
        lock = store.try_lock("t", lock_id=uuid.uuid4().bytes, owner="it")
        assert lock is not None
        assert [row.id for row in begin(store, lock).messages] == [1, 2, 3, 4, 5]
        other.cursor().execute("UPDATE kafka_topic_info SET locked_by = NULL")
        state = "SELECT session_id, relayed, (SELECT sum(id) FROM kafka_messages) FROM kafka_topic_info"
        before = store._rows(state)
        waiting = pool.submit(CALLS[call], store, lock)
        time.sleep(0.5)
        other.commit()
        with pytest.raises(Fenced):
            waiting.result()
        assert store._rows(state) == before
