"""Leases without Spark: lanes, hand-overs, and how a run ends only its own leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

import tidebook
from tests.pipeline.workloads import newer_record, write_garbage
from tidebook.core.errors import InvalidInput
from tidebook.core.event import Event
from tidebook.pipeline import lease as lease_module
from tidebook.pipeline.lease import REVOKED_SETTING, RUNS_MAX, Lease, is_revoked, revoke_leases, serve
from tidebook.pipeline.lease_scheduler import share_partitions
from tidebook.pipeline.session import PipelineSettings
from tidebook.pipeline.task_result import TaskResult
from tidebook.replication.partition import LogAndStore
from tidebook.wiring.book import Book


@pytest_asyncio.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with tidebook.open(tmp_path / "book") as book:
        await book.journal("orders").create()
        yield book


def lease(run: str, generation: int) -> Lease:
    return Lease(run, generation, (), {}, 1.0)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await holds():  # noqa: ASYNC110 - the store reports no change
            await asyncio.sleep(0.005)


class Worker:
    """A worker process; each call of `task` is the task of one lease."""

    def __init__(self, book: Book, handover_s: float = 3600.0) -> None:
        self.book, self.handover_s = book, handover_s
        self.parts = LogAndStore(book.log, book.store)

    async def task(self, generation: int = 1, seconds: float = 0.05) -> list[TaskResult]:
        config = await self.book.journal("orders").topic_config()
        partitions = tuple(("orders", number) for number in range(config.partitions))
        lease = Lease("run", generation, partitions, {"orders": config}, seconds, self.handover_s)
        return await serve(self.parts, lease)

    def running_tails(self) -> int:
        return sum(each.runs for each in lease_module._continuing[self.parts])

    async def append(self, n: int, start: int = 0) -> None:
        """Append an event to each of `n` journals, and wait until the store has them."""
        names = [f"o-{start + number}" for number in range(n)]
        for name in names:
            await self.book.journal("orders").append(name, [Event(1)])
        for name in names:
            await until(partial(self.is_stored, name))

    async def is_stored(self, name: str) -> bool:
        return bool(await self.book.store.heads("orders", [name]))

    async def wait_for_tails(self, number: int) -> None:
        """Wait until this many tails are running."""

        async def holds() -> bool:
            return self.running_tails() == number

        await until(holds)


async def test_records_between_two_tasks_are_replicated_and_counted_by_the_second_task(book: Book) -> None:
    worker = Worker(book)
    results = await worker.task()
    await worker.append(8)  # no task is running
    assert worker.running_tails() == 1
    results += await worker.task()
    await worker.wait_for_tails(1)  # the tail of the first lease ends when its slices have ended
    await worker.append(8, start=8)
    results += await worker.task()
    assert sum(each.records for each in results) >= 16  # a slice of both tails counts twice
    await revoke_leases(book.store, "run", 2)
    await worker.wait_for_tails(0)


async def test_a_revoked_lease_leaves_no_tail(book: Book) -> None:
    worker = Worker(book)
    await worker.task()
    await revoke_leases(book.store, "run", 2)
    await worker.wait_for_tails(0)
    await worker.task()
    assert not worker.running_tails()
    await worker.task(generation=2)
    assert worker.running_tails() == 1
    await revoke_leases(book.store, "run", 3)
    await worker.wait_for_tails(0)


async def test_a_tail_ends_when_a_task_of_another_process_serves_its_partitions(book: Book) -> None:
    worker, other = Worker(book), Worker(book)
    await worker.task()
    serving = asyncio.create_task(other.task(seconds=3600))
    number = 0
    while worker.running_tails():  # until the other task was faster for a record
        await worker.append(8, start=number)
        number += 8
    await worker.append(8, start=number)
    await revoke_leases(book.store, "run", 2)
    assert sum(each.records for each in await serving) >= 8


async def test_a_tail_without_a_successor_ends_after_a_while(book: Book) -> None:
    worker = Worker(book, handover_s=0.01)
    await worker.task()
    await worker.wait_for_tails(0)


async def test_a_lease_with_a_stopped_partition_leaves_no_tail_so_that_the_next_one_retries_it(book: Book) -> None:
    await write_garbage(book, "orders", value=newer_record())
    worker = Worker(book)
    assert any(each.stopped for each in await worker.task())
    assert not worker.running_tails()


def test_every_partition_has_one_lane_and_lanes_have_about_the_same_size() -> None:
    partitions = [("a", number) for number in range(7)]
    shares = share_partitions([], partitions, 3)
    assert sorted(at for share in shares for at in share) == partitions
    assert sorted(map(len, shares)) == [2, 2, 3]


def test_there_are_no_more_lanes_than_partitions() -> None:
    assert share_partitions([], [("a", 0)], 8) == [(("a", 0),)]


def test_partitions_stay_in_their_lane_when_others_join() -> None:
    before = share_partitions([], [("b", 0), ("b", 1)], 2)
    after = share_partitions(before, [("a", 0), ("a", 1), ("b", 0), ("b", 1)], 2)
    assert all(set(old) < set(new) for old, new in zip(before, after, strict=True))


def test_partitions_of_a_deleted_topic_leave_their_lane() -> None:
    before = share_partitions([], [("a", 0), ("b", 0), ("b", 1)], 2)
    assert sorted(at for share in share_partitions(before, [("b", 0), ("b", 1)], 2) for at in share) == [
        ("b", 0),
        ("b", 1),
    ]


async def test_a_run_revokes_only_its_own_earlier_generations(book: Book) -> None:
    assert not await is_revoked(book.store, lease("one", 1))
    await revoke_leases(book.store, "one", 2)
    assert await is_revoked(book.store, lease("one", 1))
    assert not await is_revoked(book.store, lease("one", 2))
    assert not await is_revoked(book.store, lease("two", 1))


async def test_only_recent_runs_are_remembered(book: Book) -> None:
    for number in range(RUNS_MAX + 5):
        await revoke_leases(book.store, f"run-{number}", 2)
    assert not await is_revoked(book.store, lease("run-0", 1))
    assert await is_revoked(book.store, lease(f"run-{RUNS_MAX + 4}", 1))
    assert len((await book.store.setting(REVOKED_SETTING) or "").split(",")) == RUNS_MAX


@pytest.mark.parametrize("wrong", [{"lease_s": 1.0}, {"lease_s": -1.0}, {"catch_up_records": -1}])
def test_invalid_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        PipelineSettings(**wrong)  # type: ignore[arg-type]
