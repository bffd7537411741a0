"""On a real PostgreSQL the scan floor waits for rows that commit late, below ids that a relay has already seen."""

from __future__ import annotations

import time
import uuid
from contextlib import closing
from typing import Any

import pytest

from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import relay_database
from tidebook import outbox
from tidebook.outbox.fence import Fence
from tidebook.outbox.port import BatchLimit, BatchSelection, NewSession, TopicLock
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.store import OutboxStore

pytestmark = [pytest.mark.postgres]

TOPIC = "orders"


def lock(store: OutboxStore) -> TopicLock:
    hold = store.try_lock(TOPIC, lock_id=uuid.uuid4().bytes, owner="a test")
    assert hold is not None
    return hold


def send(store: OutboxStore, hold: TopicLock) -> list[bytes | None]:
    """Relay the waiting messages under this lock; return what was sent."""
    session = NewSession(uuid.uuid4().bytes, Fence.NONE, "a topic")
    batch = store.begin(hold, session, lambda rows, _: BatchSelection(tuple(rows)), BatchLimit())
    store.finish(hold, [row.id for row in batch.messages], unlock=True)
    return [row.payload for row in batch.messages]


def floor(database: Any) -> int:
    return max(database._floors.known()[1], default=0)


def test_a_transaction_above_the_last_one_that_ended_holds_the_floor(postgres: Database) -> None:
    """Its number is at or above the snapshot's xmax, which covers only transactions up to the last that ended."""
    database = relay_database(postgres, OutboxSettings())
    with closing(database.connect()) as store, postgres.connect() as early, postgres.connect() as late:
        early.execute("SELECT pg_current_xact_id()")
        hold = lock(store)
        outbox.publish(late, topic=TOPIC, key=b"k", payload=b"late")
        outbox.publish(early, topic=TOPIC, key=b"k", payload=b"early")
        early.commit()
        assert send(store, hold) == [b"early"]
        for _ in range(3):
            assert send(store, lock(store)) == []
        late.commit()
        assert store.topics_waiting() == [TOPIC]
        assert send(store, lock(store)) == [b"late"]
        deadline = time.monotonic() + 30  # transactions of other tests on this server may hold the floor for a while
        while floor(database) != 1:
            assert send(store, lock(store)) == []
            assert time.monotonic() < deadline
