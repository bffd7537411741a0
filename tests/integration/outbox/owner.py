"""A relay that a test runs step by step, so that it can stop at any point."""

from __future__ import annotations

import uuid
from typing import Any

from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import Cluster, relay_database
from tidebook.outbox import batch_selection as plan
from tidebook.outbox.port import (
    BatchLimit,
    Channel,
    MessageBatch,
    NewSession,
    RelayedMessage,
    TargetTopic,
    TopicLock,
)
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.store import OutboxStore

#: A lock limit that a test can wait for, and half of it for a batch to arrive.
SHORT = OutboxSettings(lock_limit_s=2, fence_s=1, rest_s=0.2)


def short(fence: str) -> OutboxSettings:
    return OutboxSettings(lock_limit_s=2, fence_s=1, rest_s=0.2, fence=fence)  # type: ignore[arg-type]


class Owner:
    """Locks a topic and opens a session; the test drives the rest."""

    def __init__(self, database: Database, cluster: Cluster, topic: str, settings: OutboxSettings) -> None:
        self.settings = settings
        self.store: OutboxStore = relay_database(database, settings).connect()
        self.identity = self.store.identity()
        self.target = cluster.target(settings, self.identity)
        self.topic: TargetTopic = self.target.topic(topic)
        hold = self.store.try_lock(topic, lock_id=uuid.uuid4().bytes, owner="a test")
        assert hold is not None
        self.hold: TopicLock = hold
        self.channel: Channel = self.target.channel(self.topic, fresh=True)
        self.batch: MessageBatch = self.store.begin(
            hold,
            NewSession(uuid.uuid4().bytes, self.topic.fence, self.topic.uuid, self.target.ends(self.topic)),
            lambda rows, held: plan.select_batch(rows, held, self.topic, settings),
            BatchLimit(),
        )

    def messages(self) -> list[RelayedMessage]:
        return plan.to_relayed(self.batch.messages, session=self.batch.session, outbox=self.identity)

    def send(self, count: int | None = None) -> Any:
        """Send the batch, or its first `count` messages; return the outcome."""
        self.channel.start(self.messages()[:count], timestamp_ms=self.batch.opened_ms)
        while (outcome := self.channel.wait(1.0)) is None:
            pass
        return outcome

    def wait_until_lost(self) -> None:
        """Wait for the lock limit by the database's clock."""
        [[_]] = self.store._rows("SELECT pg_sleep(%s)", (self.settings.lock_limit_s + 0.1,))
