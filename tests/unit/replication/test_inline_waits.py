"""How long the replication of a process waits after failures and for its lock, in virtual time.

Its log and store are in memory. All durations are binary fractions, so that sums of them are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest

from tests.unit.replication.memory import CONFIG, MARK, TOPIC, Memory, Run, now_s
from tidebook.core.errors import Corrupt, TidebookError, Unavailable
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer
from tidebook.log.port import Record
from tidebook.replication import inline
from tidebook.replication.inline import InlineReplication, NoLock
from tidebook.replication.status import read_job_status
from tidebook.runtime.metrics import Metrics
from tidebook.testing.clock import ManualClock
from tidebook.testing.conformance.store_slices import newer_version


@asynccontextmanager
async def replicating(memory: Memory, **how: Any) -> AsyncIterator[InlineReplication]:
    port: Any = memory.faults.around(memory)
    replication = InlineReplication(port, port, clock=ManualClock(0), metrics=Metrics(), **how)
    replication.start()
    yield replication
    await replication.close()


class Times:
    """A condition of a fault, which records when the call is made."""

    def __init__(self, partition: int | None = None, *, until: int = 10_000) -> None:
        self._partition = partition
        self._until = until
        self.at_s: list[float] = []

    def __call__(self, *given: Any, **named: Any) -> bool:
        if self._partition is not None and given[1] != self._partition:
            return False
        self.at_s.append(now_s())
        return len(self.at_s) <= self._until


AWAY = Unavailable("it is down")


def test_a_partition_that_fails_is_retried_with_pauses_that_grow_until_it_succeeds(run: Run) -> None:
    async def program() -> None:
        memory, tries = Memory(), Times(0, until=3)
        memory.faults.fail("wait", AWAY, times=None, where=tries)
        async with replicating(memory) as replication:
            await memory.put()
            await asyncio.sleep(10.0)
            assert tries.at_s == [0.0, 0.125, 0.375, 0.875, 0.875], "it waits for the next record"
            assert memory.applied == [(0.875, 0, 0)]
            assert (replication.status().failures, replication.status().stopped) == (3, {})
            tries.at_s.clear()
            await memory.put()
            await asyncio.sleep(10.0)
            assert tries.at_s == [10.0, 10.125, 10.375, 10.875], "the pauses start again after a success"

    run(program())


@pytest.mark.parametrize(
    ("error", "stopped"), [(AWAY, {}), (Corrupt("lost"), {f"{TOPIC}/0": "lost", f"{TOPIC}/1": "lost"})]
)
def test_a_topic_that_cannot_be_checked_is_retried_with_growing_pauses(
    run: Run, error: TidebookError, stopped: dict[str, str]
) -> None:
    async def program() -> None:
        memory, tries = Memory(), Times(until=3)
        memory.faults.fail("topic", error, times=None, where=tries)
        async with replicating(memory) as replication:
            await memory.put()
            await asyncio.sleep(0.75)
            assert replication.status().stopped == stopped
            assert replication.status().failures == 3 * max(1, len(stopped))
            await asyncio.sleep(10.0)
            assert tries.at_s == [0.0, 0.125, 0.375, 0.875]
            assert memory.applied == [(0.875, 0, 0)]
            assert replication.status().stopped == {}

    run(program())


def test_topics_that_cannot_be_read_are_read_again_after_pauses_that_restart_after_a_success(run: Run) -> None:
    async def program() -> None:
        memory, tries = Memory(), Times(until=3)
        memory.faults.fail("topics", AWAY, times=None, where=tries)
        async with replicating(memory) as replication:
            await asyncio.sleep(0.5)
            assert (replication.status().state, replication.status().last_error) == ("waiting", f"replication: {AWAY}")
            await asyncio.sleep(0.5)
            assert tries.at_s[:4] == [0.0, 0.125, 0.375, 0.875]
            assert replication.status().state == "active"
            tries.at_s.clear()
            await asyncio.sleep(2.0)
            pauses_s = [later - earlier for earlier, later in pairwise(tries.at_s[:4])]
            assert pauses_s == pytest.approx([0.125, 0.25, 0.5])

    run(program())


def test_a_stopped_partition_is_tried_again_after_the_longest_pause(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put(value=newer_version())
        async with replicating(memory) as replication:
            await asyncio.sleep(12.0)
            assert list(replication.status().stopped) == [f"{TOPIC}/0"]
            # Reads at other times are those of the status.
            retried_s = {at_s for at_s, _ in memory.reads if at_s % inline.RETRY_MAX_S == 0}
            assert retried_s == {0.0, 5.0, 10.0}
            memory.records[0] = [Record(0, 0, None, MARK)]
            await asyncio.sleep(4.0)
            assert (replication.status().stopped, memory.applied) == ({}, [(15.0, 0, 0)])

    run(program())


def test_topics_are_listed_again_after_a_pause_and_a_wait_for_a_change(run: Run) -> None:
    async def program() -> None:
        memory, looks = Memory(), Times(until=0)
        memory.faults.fail("topics", AWAY, times=None, where=looks)
        async with replicating(memory):
            await asyncio.sleep(10.0)
            assert len(looks.at_s) <= 30  # ten of the loop, and some of the ticker and of the status

    run(program())


def test_the_status_is_stored_at_the_start_and_every_five_seconds(run: Run) -> None:
    async def program() -> None:
        memory, writes = Memory(), Times(until=0)
        memory.faults.fail("set_setting", AWAY, times=None, where=writes)
        async with replicating(memory):
            await asyncio.sleep(16.5)
            assert writes.at_s[0] == 0.0
            assert [round(later - earlier) for earlier, later in pairwise(writes.at_s)] == [5, 5, 5]

    run(program())


def test_the_stored_status_has_the_duration_and_the_speed_of_the_last_batch(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        held = memory.faults.hold("apply")
        async with replicating(memory):
            await asyncio.sleep(1.0)
            for _ in range(2):
                await memory.put()
            await held.reached()
            await asyncio.sleep(0.25)
            held.release()
            await asyncio.sleep(10.0)
            status = await read_job_status(cast(Any, memory))
            assert status is not None
            assert (status.batches, status.batch_s, status.records_per_s) == (1, 0.25, 2 / 0.25)

    run(program())


def test_an_adopted_topic_is_replicated_from_the_marks_of_its_epoch_on(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        memory.configs[TOPIC] = msgspec.structs.replace(CONFIG, epoch=2, began=((3, 50), (0, 50)))
        for partition in (0, 0, 0, 0, 1):
            await memory.put(partition)
        async with replicating(memory):
            await asyncio.sleep(10.0)
            assert memory.replicated == {0: Pointer(Position(2, 3), 50), 1: Pointer(Position(2, 0), 50)}
            assert [offset for *_, offset in memory.applied] == [3, 0], "what comes before the marks is void"

    run(program())


def test_a_status_that_cannot_be_written_does_not_disturb_the_replication(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        memory.faults.fail("set_setting", AWAY, times=None)
        async with replicating(memory) as replication:
            await asyncio.sleep(20.0)
            await memory.put()
            await asyncio.sleep(0.0625)
            assert memory.applied == [(20.0, 0, 0)]
            assert (replication.status().state, replication.status().failures) == ("active", 0)

    run(program())


def test_a_deleted_topic_is_no_longer_followed_and_a_new_one_is(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put(value=newer_version())
        async with replicating(memory) as replication:
            await asyncio.sleep(0.5)
            assert list(replication.status().stopped) == [f"{TOPIC}/0"]
            del memory.configs[TOPIC]
            await asyncio.sleep(2.0)
            assert replication.status().stopped == {}
            await memory.put(1)
            await asyncio.sleep(2.0)
            assert memory.applied == []
            memory.configs[TOPIC] = CONFIG
            await asyncio.sleep(2.0)
            assert [each[1:] for each in memory.applied] == [(1, 0)]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(program())


def test_the_partitions_of_a_deleted_last_topic_are_no_longer_reported_as_stopped(run: Run) -> None:
    """The last topic was deleted, and the replication has noticed it by an error first."""

    async def program() -> None:
        memory = Memory()
        await memory.put(value=newer_version())
        async with replicating(memory) as replication:
            await asyncio.sleep(0.5)
            assert list(replication.status().stopped) == [f"{TOPIC}/0"]
            memory.configs.clear()
            memory.faults.fail("topics", AWAY)
            await asyncio.sleep(5.0)
            assert (replication.status().state, replication.status().stopped) == ("waiting", {})

    run(program())


class LostLock(NoLock):
    """A lock that another process has for a while."""

    def take(self) -> bool:
        return not 3.0 <= now_s() < 8.0


def test_a_process_that_has_lost_its_lock_replicates_nothing_until_it_has_it_again(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        async with replicating(memory, lock=LostLock()) as replication:
            await memory.put()
            await asyncio.sleep(5.0)
            assert replication.status().state == "passive"
            await memory.put()
            await asyncio.sleep(2.5)
            assert memory.applied == [(0.0, 0, 0)]
            await asyncio.sleep(2.5)
            assert replication.status().state == "active"
            assert [offset for *_, offset in memory.applied] == [0, 1]
            assert memory.applied[1][0] >= 8.0

    run(program())


# ---- a process that waits for the lock


class HeldLock:
    """A lock that another process holds, which responds until a given time and not after it."""

    def __init__(self, responds_until_s: float | None) -> None:
        self.until_s = responds_until_s
        self.seized_s: list[float] = []
        self.released = 0

    def take(self) -> bool:
        return False

    def last_beat(self) -> int | None:
        return None if self.until_s is None else int(min(now_s(), self.until_s))

    def seize(self) -> None:
        self.seized_s.append(now_s())

    def release(self) -> None:
        self.released += 1


def test_a_holder_that_is_silent_is_reported_after_a_while_and_its_lock_is_seized_later(run: Run) -> None:
    async def program() -> None:
        lock = HeldLock(responds_until_s=5.0)
        async with replicating(Memory(), lock=lock) as replication:
            reported = {}
            for second in range(17):
                await asyncio.sleep(0.5)
                status = replication.status()
                assert status.state == "passive"
                reported[second] = status.silent_holder
                await asyncio.sleep(0.5)
            assert [second for second, text in reported.items() if text] == list(range(8, 17))
            assert reported[8] == "the process that replicates has not responded for 3 s"
            assert reported[16] == "the process that replicates has not responded for 11 s"
            assert replication.status().describe() == f"passive: {replication.status().silent_holder}"
            assert lock.seized_s == [15.0, 16.0, 17.0]
        assert lock.released == 1

    run(program())


@pytest.mark.parametrize("until_s", [None, 10_000.0], ids=["unknown", "it responds"])
def test_a_holder_that_responds_or_whose_state_is_unknown_keeps_its_lock(run: Run, until_s: float | None) -> None:
    async def program() -> None:
        lock = HeldLock(until_s)
        async with replicating(Memory(), lock=lock) as replication:
            await asyncio.sleep(60.5)
            assert (replication.status().state, replication.status().silent_holder) == ("passive", None)
        assert lock.seized_s == []

    run(program())


def test_a_holder_that_responds_again_is_no_longer_reported(run: Run) -> None:
    async def program() -> None:
        lock = HeldLock(responds_until_s=0.0)
        async with replicating(Memory(), lock=lock) as replication:
            await asyncio.sleep(5.5)
            assert replication.status().silent_holder is not None
            lock.until_s = 10_000.0
            await asyncio.sleep(1.0)
            assert replication.status().silent_holder is None

    run(program())
