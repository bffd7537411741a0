"""Replicators that were paused at any single write, and go on when others have long done their work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import copy
from itertools import product
from typing import NamedTuple
from uuid import uuid4

import pytest

from tidebook.core.action import Action
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, Pointer, SliceWrites
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Record
from tidebook.pipeline.slice import plan_slice, replicate_slice
from tidebook.store.cassandra import CassandraStore
from tidebook.store.cassandra.mutations import Batch
from tidebook.testing.conformance.journal_records import FIRST_MS, Step, append, delete, purge, records_of, truth_of

pytestmark = pytest.mark.cassandra

OpenStore = Callable[[], Awaitable[CassandraStore]]
#: Segments of two events: every action of these histories crosses their borders.
SEGMENT_SIZE = 2
#: So many that every trial has a log partition, and a pointer, of its own.
PARTITIONS = 2**31 - 1
AT_ONCE = 100
#: Above every number that the histories reach: what should be gone is looked for there too.
NUMBERS_MAX = 24

ACTIONS: dict[str, Action] = {
    "1": append(1),
    "3": append(3),
    "at5": append(1, at=5),
    "del2": delete(2),
    "purge": purge(),
}
#: The shapes that once broke a rule set, beside all short ones.
CHOSEN = ["3 purge 1 purge", "3 del2 purge 1", "del2 purge 3 del2", "3 purge at5 del2", "1 at5 purge 3"]


class Trial(NamedTuple):
    """A history, and a replicator that took records `start` to `stop` and is held at its write number `held_at`."""

    history: str
    start: int
    stop: int
    held_at: int
    whole: bool


def histories(lengths: Sequence[int]) -> Iterator[str]:
    for length in lengths:
        for names in product(ACTIONS, repeat=length):
            if names[0] != "purge":  # a purge of nothing does nothing
                yield " ".join(names)


def steps_of(history: str, id: str) -> list[Step]:
    return [(id, ACTIONS[name]) for name in history.split()]


class Held:
    """Stands before a store's single writes and lets all pass but one, which waits until it is let go."""

    def __init__(self, store: CassandraStore, held_at: int) -> None:
        self._pass_on = store.write
        self._held_at = held_at
        self._count = 0
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()

    async def __call__(self, batch: Batch) -> None:
        self._count += 1
        if self._count == self._held_at:
            self.reached.set()
            await self.let_go.wait()
        await self._pass_on(batch)


@pytest.fixture
async def facts(open_store: OpenStore) -> tuple[str, TopicFacts]:
    topic = f"t-{uuid4().hex}"
    wanted = TopicFacts(topic_id=topic, partitions=PARTITIONS, segment_size=SEGMENT_SIZE, segments=64)
    return topic, await (await open_store()).set_facts(topic, wanted, expected=None)


async def hold_one(
    store: CassandraStore, topic: str, facts: TopicFacts, trial: Trial, id: str, zombie: CassandraStore
) -> bool:
    """Run one trial; False where the held replicator had not that many writes."""
    steps = steps_of(trial.history, id)
    partition, records = partition_of(id, PARTITIONS), records_of(steps)
    for record in records[: trial.start]:
        await replicate_slice(store, topic, partition, [record], facts)
    plan = await plan_slice(zombie, topic, partition, records[trial.start : trial.stop], facts)
    assert plan.writes is not None
    held = Held(zombie, trial.held_at)
    applying = asyncio.create_task(apply_through(zombie, plan.writes, held))
    reaching = asyncio.create_task(held.reached.wait())
    await asyncio.wait([applying, reaching], return_when=asyncio.FIRST_COMPLETED)
    reaching.cancel()
    for part in [records] if trial.whole else [[record] for record in records]:
        await replicate_slice(store, topic, partition, part, facts)
    held.let_go.set()
    await applying
    await assert_rows(store, topic, facts, id, steps, trial)
    return held.reached.is_set()


async def apply_through(store: CassandraStore, writes: SliceWrites, write: Callable[[Batch], Awaitable[None]]) -> None:
    """Apply a slice on a store whose single writes go another way; other slices of the store do not notice."""
    twin = copy(store)
    twin.write = write
    await twin.apply(writes)


async def assert_rows(
    store: CassandraStore, topic: str, facts: TopicFacts, id: str, steps: list[Step], why: object
) -> None:
    """What lies in the tables is the fold's result: nothing is missing, and nothing came back."""
    truth = truth_of(steps, facts)[id]
    key = Key(topic, id)
    assert await store.head(key) == truth.head, why
    end = Position(facts.epoch, len(steps) - 1)
    assert await store.pointer(topic, partition_of(id, PARTITIONS)) == Pointer(end, FIRST_MS + end.offset * 1000), why
    everything = Head(True, NUMBERS_MAX, 0, end, end, SEGMENT_SIZE, None, 0, (), None, ())
    rows: list[EventRow] = []
    while page := await store.events(key, everything, after=rows[-1].seq_nr if rows else 0, to=NUMBERS_MAX, limit=9):
        rows += page
    assert tuple(rows) == truth.rows, why


async def run_trials(
    store: CassandraStore, zombie: CassandraStore, topic: str, facts: TopicFacts, chosen: Sequence[str]
) -> int:
    """Every range of records, every single write of it, and both ways for the other replicator."""
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
            held_at = 0
            reached = True
            while reached:
                held_at += 1
                trial = Trial(history, start, stop, held_at, whole)
                reached = await hold_one(store, topic, facts, trial, f"{trial}", zombie)
                done += 1

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return done


@pytest.mark.timeout(3600)
async def test_a_replicator_held_at_any_write_and_resumed_late_changes_nothing(
    open_store: OpenStore, facts: tuple[str, TopicFacts], long_form: bool
) -> None:
    topic, of_topic = facts
    chosen = [*histories((1, 2, 3, 4) if long_form else (1, 2)), *CHOSEN]
    trials = await run_trials(await open_store(), await open_store(), topic, of_topic, chosen)
    assert trials > 10 * len(chosen)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
async def test_replicators_that_interleave_and_die_at_any_write_leave_what_the_fold_says(
    open_store: OpenStore, facts: tuple[str, TopicFacts], seed: int, long_form: bool
) -> None:
    topic, of_topic = facts
    stores = [await open_store() for _ in range(3)]
    for number in range(60 if long_form else 12):
        chance = random.Random(f"{seed}/{number}")
        history = " ".join(["3", *chance.choices(list(ACTIONS), k=chance.randint(3, 7))])
        await interleave(stores, topic, of_topic, f"{seed}/{number}", history, chance)


async def interleave(
    stores: list[CassandraStore], topic: str, facts: TopicFacts, id: str, history: str, chance: random.Random
) -> None:
    """Some replicators advance by single writes, in an order that chance decides; some never finish."""
    steps = steps_of(history, id)
    partition, records = partition_of(id, PARTITIONS), records_of(steps)
    running: list[Stepwise] = []
    for _ in range(40):
        if len(running) < 4 and chance.random() < 0.4:
            writes = await plan_some(stores[0], topic, partition, records, facts, chance)
            if writes is not None:
                running.append(Stepwise(chance.choice(stores), writes))
        if running:
            await chance.choice(running).advance()
    abandoned = [each for each in running if chance.random() < 0.3]
    await replicate_slice(stores[1], topic, partition, records, facts)
    for each in running:
        if each in abandoned:
            await each.abandon()
        else:
            await each.finish()
    await assert_rows(stores[2], topic, facts, id, steps, (id, history))


async def plan_some(
    store: CassandraStore, topic: str, partition: int, records: list[Record], facts: TopicFacts, chance: random.Random
) -> SliceWrites | None:
    pointer = await store.pointer(topic, partition)
    start = 0 if pointer is None else pointer.position.offset + 1
    stop = chance.randint(start, len(records))
    return (await plan_slice(store, topic, partition, records[:stop], facts)).writes


class Stepwise:
    """A replicator that writes only when it is told to."""

    def __init__(self, store: CassandraStore, writes: SliceWrites) -> None:
        self._pass_on = store.write
        self._turns: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self._task = asyncio.create_task(apply_through(store, writes, self._write))

    async def _write(self, batch: Batch) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.put_nowait(turn)
        await turn
        await self._pass_on(batch)

    async def advance(self) -> None:
        """Let one write through, if one waits or will."""
        getting = asyncio.create_task(self._turns.get())
        await asyncio.wait([getting, self._task], return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            getting.result().set_result(None)
        else:
            getting.cancel()

    async def finish(self) -> None:
        while not self._task.done():
            await self.advance()
        await self._task

    async def abandon(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
