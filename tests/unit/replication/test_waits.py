"""How long a tail and a partition wait, and what ends a wait: in virtual time, over a log and a store in memory.

All durations are binary fractions, so that sums of them are exact.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.replication.memory import CONFIG, MARK, TOPIC, Memory, Run, ended_at, now_s
from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer
from tidebook.log.port import Record
from tidebook.replication import partition, tail
from tidebook.replication.partition import PartitionReplicator
from tidebook.replication.tail import ReplicationTail
from tidebook.testing.conformance.store_slices import newer_version


def tail_of(memory: Memory, *partitions: int, slice_every_s: float = 0.0, wait_s: float = 0.0) -> ReplicationTail:
    configs = {(TOPIC, each): CONFIG for each in partitions or (0,)}
    return ReplicationTail(memory.parts, configs, slice_every_s=slice_every_s, wait_s=wait_s)


# ---- a tail


def test_the_slices_of_a_busy_partition_begin_a_while_after_one_another(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        tail = tail_of(memory, slice_every_s=1.0)
        running = asyncio.ensure_future(tail.run())
        for _ in range(5):  # at 0.0, 0.25, 0.5, 0.75 and 1.0
            await memory.put()
            await asyncio.sleep(0.25)
        await asyncio.sleep(2.0)
        await memory.put()
        await asyncio.sleep(0.5)
        tail.stop()
        assert await ended_at(running) == 3.75, "a stop ends the pause"
        assert [at_s for at_s, *_ in memory.applied] == [0.0, 1.0, 3.25]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(program())


def test_a_tail_that_waits_for_records_leaves_no_tasks(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        tail = tail_of(memory)
        running = asyncio.ensure_future(tail.run())
        tasks = []
        for _ in range(5):
            await memory.put()
            await asyncio.sleep(1.0)
            tasks.append(len(asyncio.all_tasks()))
        assert tasks == tasks[:1] * 5
        tail.stop()
        await running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(program())


def test_a_tail_with_stops_does_not_pause_between_its_slices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "PAGE_RECORDS", 1)

    async def program() -> None:
        memory = Memory()
        for _ in range(4):
            await memory.put()
        assert await ended_at(tail_of(memory, slice_every_s=9.0).run({(TOPIC, 0): 3})) == 0.0
        assert [offset for *_, offset in memory.applied] == [0, 1, 2]

    run(program())


def test_a_tail_continues_from_the_pointer_that_another_replicator_has_moved(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        tail_ = tail_of(memory)
        running = asyncio.ensure_future(tail_.run())
        await asyncio.sleep(1.0)
        memory.records[0] = [Record(offset, 0, None, MARK) for offset in range(5)]  # nothing wakes the tail
        memory.replicated[0] = Pointer(Position(1, 3), 0)
        await asyncio.sleep(tail.CHECK_EVERY_S)
        assert memory.reads == [(tail.CHECK_EVERY_S, 4)]
        assert memory.applied == [(tail.CHECK_EVERY_S, 0, 4)]
        tail_.stop()
        await running

    run(program())


@pytest.mark.parametrize("error", [Unavailable("it is down"), OutcomeUnknown("no answer")])
@pytest.mark.parametrize("call", ["pointer", "wait", "read"])
def test_a_tail_retries_with_growing_pauses_until_its_deadline(run: Run, call: str, error: TidebookError) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put()
        memory.faults.fail(call, error, times=None)
        assert await ended_at(tail_of(memory, wait_s=0.875).run(), type(error)) == 0.875
        assert memory.faults.calls[call] == 4  # at 0.0, 0.125, 0.375 and 0.875

    run(program())


def test_a_tail_that_is_stopped_while_the_log_is_unavailable_ends_at_once(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put()
        memory.faults.fail("read", Unavailable("it is down"), times=None)
        tail = tail_of(memory, wait_s=60.0)
        running = asyncio.ensure_future(tail.run())
        await asyncio.sleep(0.25)
        tail.stop()
        assert await ended_at(running, Unavailable) == 0.25

    run(program())


def test_an_error_of_one_partition_ends_the_tail_after_the_slices_in_progress(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put(0)
        held = memory.faults.hold("apply", where=lambda writes: writes.partition == 0)
        running = asyncio.ensure_future(tail_of(memory, 0, 1).run())
        await held.reached()
        memory.faults.fail("read", LogLost(topic=TOPIC, partition=1, first=0, last=0))
        await memory.put(1)
        await asyncio.sleep(5.0)
        assert not running.done()
        held.release()
        assert await ended_at(running, LogLost) == 5.0
        assert memory.applied == [(5.0, 0, 0)]

    run(program())


def test_a_tail_whose_partition_is_stopped_waits_for_its_end(run: Run) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put()
        await memory.put(value=newer_version())
        endless = tail_of(memory)
        running = asyncio.ensure_future(endless.run())
        await asyncio.sleep(100.0)
        assert (endless.replicators[TOPIC, 0].stopped is None, running.done()) == (False, False)
        endless.stop()
        assert await ended_at(running) == 100.0
        assert await ended_at(tail_of(memory).run({(TOPIC, 0): 2})) == 100.0, "a tail with end offsets ends"

    run(program())


# ---- a partition


def replicator(memory: Memory, *, wait_s: float = 0.0) -> PartitionReplicator:
    return PartitionReplicator(memory.parts, TOPIC, 0, CONFIG, wait_s=wait_s)


@pytest.mark.parametrize("error", [Unavailable("it is down"), OutcomeUnknown("no answer")])
def test_a_slice_is_retried_with_growing_pauses_until_its_deadline(run: Run, error: TidebookError) -> None:
    async def program() -> None:
        memory = Memory()
        await memory.put()
        memory.faults.fail("apply", error, times=None)
        for wait_s, end_s, tries in ((0.875, 0.875, 4), (0.75, 0.375, 3), (0.0, 0.0, 1)):
            began_s, before = now_s(), memory.faults.calls["apply"]
            running = replicator(memory, wait_s=wait_s).replicate(memory.records[0])
            assert await ended_at(running, type(error)) == began_s + end_s
            assert memory.faults.calls["apply"] - before == tries

    run(program())


def test_a_fenced_slice_is_planned_again_a_bounded_number_of_times_with_pauses(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "FENCED_MAX", 3)
    monkeypatch.setattr(partition, "FENCED_WAIT_S", 0.5)

    async def program() -> None:
        memory = Memory()
        await memory.put()
        memory.faults.fail("apply", Fenced("another was faster"), times=4)
        assert await ended_at(replicator(memory).replicate(memory.records[0]), Fenced) == 1.5
        memory.faults.fail("apply", Fenced("another was faster"), times=3)
        assert await ended_at(replicator(memory).replicate(memory.records[0])) == 3.0
        assert memory.applied == [(3.0, 0, 0)]

    run(program())
