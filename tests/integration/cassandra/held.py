"""Pause a replicator at one of its writes while another one does all the work; then let it continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import NamedTuple
from uuid import uuid4

import pytest

from tests.integration.cassandra.conftest import KEYSPACE
from tidebook.core.key import partition_of
from tidebook.core.replication_plan import SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.replication.slice import plan_slice
from tidebook.store.cassandra import CassandraSettings, CassandraStore
from tidebook.store.cassandra.mutations import Batch
from tidebook.testing.conformance.journal_records import Step, records_of
from tidebook.testing.replicating import replicate_slice

OpenStore = Callable[[], Awaitable[CassandraStore]]
#: Segments of two events: every action of these histories crosses a segment boundary.
SEGMENT_SIZE = 2
#: Enough for every trial to have its own log partition and pointer.
PARTITIONS = 2**31 - 1


@pytest.fixture(params=[1, 10], ids=["alone", "together"])
def settings(request: pytest.FixtureRequest, cassandra_address: str) -> CassandraSettings:
    """Return settings that send small requests one by one or combined; combined, there are fewer writes to pause at."""
    url = f"cassandra://{cassandra_address}/{KEYSPACE}"
    return CassandraSettings.read(url, {"partitions_together_max": request.param})


class Trial(NamedTuple):
    """A history, and a replicator that has read records `start` to `stop` and is paused at write number `held_at`."""

    history: str
    start: int
    stop: int
    held_at: int
    whole: bool


class Held:
    """Wraps a store's single writes; one of them waits until it is released, and the others pass."""

    def __init__(self, store: CassandraStore, held_at: int) -> None:
        self._pass_on = store.write
        self._held_at = held_at
        self._count = 0
        self.reached = asyncio.Event()
        self.resumed = asyncio.Event()

    async def __call__(self, batch: Batch) -> None:
        self._count += 1
        if self._count == self._held_at:
            self.reached.set()
            await self.resumed.wait()
        await self._pass_on(batch)


@pytest.fixture
async def new_topic(open_store: OpenStore) -> tuple[str, TopicConfig]:
    topic = f"t-{uuid4().hex}"
    wanted = TopicConfig(topic_id=topic, partitions=PARTITIONS, segment_size=SEGMENT_SIZE, segments=64)
    return topic, await (await open_store()).set_topic_config(topic, wanted, expected=None)


async def apply_through(store: CassandraStore, writes: SliceWrites, write: Callable[[Batch], Awaitable[None]]) -> None:
    """Apply a slice with a replacement for the store's single writes; other slices of the store are unaffected."""
    twin = copy(store)
    twin.write = write
    await twin.apply(writes)


class Stage(NamedTuple):
    """Two replicators of a topic: one that works, and one that is paused."""

    store: CassandraStore
    zombie: CassandraStore
    topic: str
    config: TopicConfig

    async def hold(self, trial: Trial, id: str, steps: Sequence[Step]) -> bool:
        """Run one trial; return False if the paused replicator had fewer writes than that."""
        store, zombie, topic, config = self
        partition, records = partition_of(id, PARTITIONS), records_of(steps)
        for record in records[: trial.start]:
            await replicate_slice(store, topic, partition, [record], config)
        plan = await plan_slice(zombie, topic, partition, records[trial.start : trial.stop], config)
        assert plan.writes is not None
        held = Held(zombie, trial.held_at)
        applying = asyncio.create_task(apply_through(zombie, plan.writes, held))
        reaching = asyncio.create_task(held.reached.wait())
        await asyncio.wait([applying, reaching], return_when=asyncio.FIRST_COMPLETED)
        reaching.cancel()
        for part in [records] if trial.whole else [[record] for record in records]:
            await replicate_slice(store, topic, partition, part, config)
        held.resumed.set()
        await applying
        return held.reached.is_set()


async def run_trials(hold_one: Callable[[Trial], Awaitable[bool]], chosen: Sequence[str], *, at_once: int) -> int:
    """Run a trial for every range of records, each of its writes, and both modes of the other replicator."""
    waiting = iter(
        (history, start, stop, whole)
        for history in chosen
        for start in range(len(history.split()))
        for stop in range(start + 1, len(history.split()) + 1)
        for whole in (True, False)
    )
    done = 0

    async def work() -> None:
        nonlocal done
        for history, start, stop, whole in waiting:
            held_at, reached = 0, True
            while reached:
                held_at += 1
                reached = await hold_one(Trial(history, start, stop, held_at, whole))
                done += 1

    await asyncio.gather(*(work() for _ in range(at_once)))
    return done
