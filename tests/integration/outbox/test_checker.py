"""The torture test's checker finds errors: each scenario breaks one assumption of the relay."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.integration.outbox.checker import arrived, faults
from tests.integration.outbox.databases import Database
from tests.integration.outbox.owner import SHORT, Owner, short
from tests.integration.outbox.relaying import Cluster, publish
from tidebook.outbox.port import BatchSent

COMMITTED = {b"k": range(10)}


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({b"k": [0, 1, 2]}, set()),
        ({b"k": [0, 1, 1, 2]}, {"twice"}),
        ({b"k": [0, 1, 2, 0]}, {"twice"}),
        ({b"k": [0, 2]}, {"lost"}),
        ({}, {"lost"}),
        ({b"k": [0, 2, 1]}, {"out of order"}),
        ({b"k": [0, 1, 2, 3]}, {"never committed"}),
        ({b"k": [0, 1, 2], b"other": [0]}, {"never committed"}),
        ({b"k": [2, 1, 1]}, {"twice", "lost", "out of order"}),
    ],
)
def test_every_fault_is_reported_by_name(found: dict[bytes, list[int]], wrong: set[str]) -> None:
    assert faults(found, {b"k": [0, 1, 2]}) == wrong


@pytest.fixture
def topic(postgres: Database, cluster: Cluster) -> str:
    """Create a topic with ten waiting messages."""
    made = cluster.topic()
    publish(postgres, made, *((b"k", f"k:{n}".encode()) for n in COMMITTED[b"k"]))
    return made


def faults_of(cluster: Cluster, topic: str) -> set[str]:
    return faults(arrived(cluster, [topic]), COMMITTED)


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.parametrize("fence", ["timestamp", "transaction", "none"])
def test_a_paused_owner_without_a_fence_is_found_to_send_twice(
    postgres: Database, cluster: Cluster, owners: Any, topic: str, fence: str
) -> None:
    paused: Owner = owners(topic, short(fence))
    paused.wait_until_lost()
    assert cluster.relay(postgres, short(fence)).run(once=True) == 10
    paused.send()
    assert faults_of(cluster, topic) == ({"twice"} if fence == "none" else set())


@pytest.mark.kafka
@pytest.mark.postgres
def test_an_open_session_without_a_scan_is_found_to_be_sent_twice(
    postgres: Database, cluster: Cluster, owners: Any, topic: str
) -> None:
    dead: Owner = owners(topic)
    assert isinstance(dead.send(4), BatchSent)
    postgres.query("UPDATE kafka_topic_info SET session_id = NULL, session_ids = NULL, locked_by = NULL")
    assert cluster.relay(postgres, SHORT).run(once=True) == 10
    assert faults_of(cluster, topic) == {"twice"}


@pytest.mark.kafka
@pytest.mark.postgres
def test_a_delete_without_its_guard_is_found_to_lose_messages(
    postgres: Database, cluster: Cluster, owners: Any, topic: str
) -> None:
    lost: Owner = owners(topic)
    lost.wait_until_lost()
    owners(topic)  # the new owner has the lock, and dies before it sends
    [[uuid]] = postgres.query("SELECT locked_by FROM kafka_topic_info")
    unguarded = msgspec.structs.replace(lost.hold, uuid=uuid.bytes)
    lost.store.finish(unguarded, [row.id for row in lost.batch.messages], unlock=True)
    cluster.relay(postgres, SHORT).run(once=True)
    assert faults_of(cluster, topic) == {"lost"}


@pytest.mark.kafka
@pytest.mark.postgres
def test_a_relay_that_skips_the_first_row_is_found_to_change_the_order(
    postgres: Database, cluster: Cluster, topic: str
) -> None:
    postgres.query("UPDATE kafka_messages SET id = id + 1000 WHERE id <= 5")
    assert cluster.relay(postgres, SHORT).run(once=True) == 10
    assert faults_of(cluster, topic) == {"out of order"}
