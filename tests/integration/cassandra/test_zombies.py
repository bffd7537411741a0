"""A replicator that is paused at any single write, and continues after others have done its work, changes no row."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from tests.integration.cassandra.held import (
    PARTITIONS,
    SEGMENT_SIZE,
    OpenStore,
    Stage,
    Trial,
    apply_through,
    run_trials,
)
from tests.integration.cassandra.held import new_topic as new_topic
from tests.integration.cassandra.held import settings as settings
from tidebook.core.action import Action
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.replication.slice import plan_slice
from tidebook.store.cassandra import CassandraStore
from tidebook.store.cassandra.mutations import Batch
from tidebook.testing.conformance.journal_records import (
    FIRST_MS,
    Step,
    append,
    delete,
    expected_journals,
    purge,
    records_of,
)
from tidebook.testing.replicating import replicate_slice

pytestmark = pytest.mark.cassandra

AT_ONCE = 100
#: Above every number of the histories: the tests also look there for rows that should be gone.
NUMBERS_MAX = 24

ACTIONS: dict[str, Action] = {
    "1": append(1),
    "3": append(3),
    "at5": append(1, at=5),
    "del2": delete(2),
    "purge": purge(),
}
#: A longer jump, over more segments: only in selected histories.
FURTHER: dict[str, Action] = {"at9": append(2, at=9), "at15": append(1, at=15), "del9": delete(9)}
#: Histories that once violated a rule, in addition to all short ones.
CHOSEN = ["3 purge 1 purge", "3 del2 purge 1", "del2 purge 3 del2", "3 purge at5 del2", "1 at5 purge 3"]
#: The segments before a jump are found through the segment list.
JUMPS = ["1 at5 at9 purge", "at5 at9 del9 at15", "1 at9 purge at5 at15", "at5 at9 del9 purge 1"]


def histories(lengths: Sequence[int]) -> Iterator[str]:
    for length in lengths:
        for names in product(ACTIONS, repeat=length):
            if names[0] != "purge":  # a purge of nothing does nothing
                yield " ".join(names)


def steps_of(history: str, id: str) -> list[Step]:
    return [(id, ACTIONS.get(name) or FURTHER[name]) for name in history.split()]


async def assert_rows(
    store: CassandraStore, topic: str, config: TopicConfig, id: str, steps: list[Step], why: object
) -> None:
    """Check that the tables contain the result of the fold: no row is missing, and none was resurrected."""
    truth = expected_journals(steps, config)[id]
    key = Key(topic, id)
    assert await store.head(key) == truth.head, why
    end = Position(config.epoch, len(steps) - 1)
    assert await store.pointer(topic, partition_of(id, PARTITIONS)) == Pointer(end, FIRST_MS + end.offset * 1000), why
    everything = Head(True, NUMBERS_MAX, 0, end, end, SEGMENT_SIZE, None, 0, (), None, ())
    assert await all_rows(store, key, everything) == truth.rows, why
    if truth.head is not None:
        assert await all_rows(store, key, truth.head) == truth.rows, why


async def all_rows(store: CassandraStore, key: Key, head: Head) -> tuple[EventRow, ...]:
    rows: list[EventRow] = []
    while page := await store.events(key, head, after=rows[-1].seq_nr if rows else 0, to=head.seq_nr, limit=9):
        rows += page
    return tuple(rows)


@pytest.mark.timeout(3600)
async def test_a_replicator_paused_at_any_write_and_resumed_late_changes_nothing(
    open_store: OpenStore, new_topic: tuple[str, TopicConfig], long_form: bool
) -> None:
    topic, of_topic = new_topic
    stage = Stage(await open_store(), await open_store(), topic, of_topic)
    chosen = [*histories((1, 2, 3, 4) if long_form else (1, 2)), *CHOSEN, *JUMPS[: None if long_form else 2]]

    async def hold_one(trial: Trial) -> bool:
        steps = steps_of(trial.history, f"{trial}")
        reached = await stage.hold(trial, f"{trial}", steps)
        await assert_rows(stage.store, topic, of_topic, f"{trial}", steps, trial)
        return reached

    assert await run_trials(hold_one, chosen, at_once=AT_ONCE) > 10 * len(chosen)


async def test_the_events_of_a_delete_stay_readable_until_its_head_is_written(
    open_store: OpenStore, new_topic: tuple[str, TopicConfig]
) -> None:
    topic, of_topic = new_topic
    store, id = await open_store(), "ahead"
    steps = steps_of("3 del2", id)
    partition, records, key = partition_of(id, PARTITIONS), records_of(steps), Key(topic, id)
    writes = (await plan_slice(store, topic, partition, records, of_topic)).writes
    assert writes is not None
    ahead = Stepwise(await open_store(), writes)
    await replicate_slice(store, topic, partition, records[:1], of_topic)
    before = await store.head(key)
    await ahead.advance()  # its rows
    head = await store.head(key)
    assert head == before is not None
    assert [row.seq_nr for row in await store.events(key, before, after=0, to=3, limit=9)] == [1, 2, 3]
    await ahead.finish()
    await assert_rows(store, topic, of_topic, id, steps, "at the end")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
async def test_replicators_that_interleave_and_die_at_any_write_leave_the_result_of_the_fold(
    open_store: OpenStore, new_topic: tuple[str, TopicConfig], seed: int, long_form: bool
) -> None:
    topic, of_topic = new_topic
    stores = [await open_store() for _ in range(3)]
    for number in range(60 if long_form else 12):
        chance = random.Random(f"{seed}/{number}")
        history = " ".join(["3", *chance.choices(list(ACTIONS), k=chance.randint(3, 7))])
        await interleave(stores, topic, of_topic, f"{seed}/{number}", history, chance)


async def interleave(
    stores: list[CassandraStore], topic: str, config: TopicConfig, id: str, history: str, chance: random.Random
) -> None:
    """Advance several replicators by single writes in a random order; abandon some of them."""
    steps = steps_of(history, id)
    partition, records = partition_of(id, PARTITIONS), records_of(steps)
    running: list[Stepwise] = []
    for _ in range(40):
        if len(running) < 4 and chance.random() < 0.4:
            writes = await plan_some(stores[0], topic, partition, records, config, chance)
            if writes is not None:
                running.append(Stepwise(chance.choice(stores), writes))
        if running:
            await chance.choice(running).advance()
    abandoned = [each for each in running if chance.random() < 0.3]
    await replicate_slice(stores[1], topic, partition, records, config)
    for each in running:
        if each in abandoned:
            await each.abandon()
        else:
            await each.finish()
    await assert_rows(stores[2], topic, config, id, steps, (id, history))


async def plan_some(
    store: CassandraStore, topic: str, partition: int, records: list[Record], config: TopicConfig, chance: random.Random
) -> SliceWrites | None:
    pointer = await store.pointer(topic, partition)
    start = 0 if pointer is None else pointer.position.offset + 1
    stop = chance.randint(start, len(records))
    return (await plan_slice(store, topic, partition, records[:stop], config)).writes


class Stepwise:
    """A replicator that writes only on request."""

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
        """Let the next write pass, if there is one."""
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
