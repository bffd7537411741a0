"""A worker claims due entries, extends its leases, and stops without losing an entry."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tidebook
from tests.integration.queue.patience import until
from tidebook.core.errors import TidebookError, Unavailable
from tidebook.queue.job import Job
from tidebook.queue.port import QueueSettings
from tidebook.queue.queue import Queue
from tidebook.queue.retry import Retry
from tidebook.queue.worker import Handler, Worker

pytestmark = pytest.mark.postgres
NO_REST = Retry(first_s=0.0, spread=0.0)


@asynccontextmanager
async def working(queue: Queue, handler: Handler, **settings: object) -> AsyncIterator[Worker]:
    """Run a worker during the block."""
    worker = Worker(queue, handler, **settings)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(running, 60)


async def empty(queue: Queue) -> None:
    """Wait until the queue has neither waiting nor processing entries."""
    async with asyncio.timeout(60):
        while (status := await queue.status()).waiting or status.processing:  # noqa: ASYNC110  there is no event to await
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["async", "sync", "awaitable"])
async def test_a_handler_may_be_async_or_not(book: tidebook.Book, kind: str) -> None:
    queue, seen, threads = book.queue("mail"), list[object](), set[str]()

    def handle(job: Job) -> None:
        seen.append(job.data)
        threads.add(threading.current_thread().name)

    async def handle_async(job: Job) -> None:
        handle(job)

    handlers: dict[str, Handler] = {"async": handle_async, "sync": handle, "awaitable": lambda job: handle_async(job)}
    await queue.put_many(list(range(30)))
    worker = Worker(queue, handlers[kind], concurrency=4)
    await worker.run(once=True)
    assert sorted(seen, key=str) == sorted(range(30), key=str)
    assert (worker.done, worker.failed, worker.lost) == (30, 0, 0)
    assert all(name.startswith("queue mail") for name in threads) == (kind == "sync")
    assert (await queue.status()).waiting == 0


async def test_after_a_burst_a_put_elsewhere_is_claimed_at_once(where: Path) -> None:
    async with tidebook.open(where) as here, tidebook.open(where) as there:
        seen: dict[object, float] = {}

        async def handle(job: Job) -> None:
            await asyncio.sleep(0.02)
            seen[job.data] = time.monotonic()

        async with working(here.queue("mail"), handle, concurrency=4) as worker:
            await until(lambda: here.metrics.counted("queue_due_date_reads") >= 3)
            await there.queue("mail").put_many(list(range(30)))
            await until(lambda: worker.done == 30)
            late_s = []
            for name in ("a", "b", "c"):
                await asyncio.sleep(0.2)  # a pause in the work: the listener has polled, and sleeps
                began = time.monotonic()
                await there.queue("mail").put(name)
                await until(lambda name=name: name in seen)  # type: ignore[misc]
                late_s.append(seen[name] - began)
        assert max(late_s) < 2, "only a poll found it"


async def test_a_later_put_is_claimed_at_once(book: tidebook.Book) -> None:
    queue, seen = book.queue("mail"), asyncio.Event()

    async def handle(job: Job) -> None:
        seen.set()

    async with working(queue, handle):
        await until(lambda: book.metrics.counted("queue_due_date_reads") >= 3)
        began = time.monotonic()
        await queue.put("x")
        await asyncio.wait_for(seen.wait(), 30)
        assert time.monotonic() - began < 4, "only the slow poll found it"


@pytest.mark.parametrize("blocking", [False, True])
async def test_no_more_jobs_run_concurrently_than_configured(book: tidebook.Book, blocking: bool) -> None:
    queue, lock = book.queue("mail"), threading.Lock()
    running = most = 0

    def count(change: int) -> None:
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)

    def handle(job: Job) -> None:
        count(1)
        time.sleep(0.01)
        count(-1)

    async def handle_async(job: Job) -> None:
        count(1)
        await asyncio.sleep(0.01)
        count(-1)

    await queue.put_many(list(range(40)))
    await Worker(queue, handle if blocking else handle_async, concurrency=5).run(once=True)
    assert most == 5


async def test_heartbeats_extend_the_lease_of_a_long_job(where: Path) -> None:
    async with tidebook.open(where) as here, tidebook.open(where) as there:
        ended = asyncio.Event()

        async def handle(job: Job) -> None:
            await ended.wait()

        await here.queue("mail").put("long")
        async with working(here.queue("mail"), handle, lease_s=0.3) as worker:
            await until(lambda: bool(worker._held))
            deadline = time.monotonic() + 1.2
            while time.monotonic() < deadline:
                assert await there.queue("mail").claim() == []
                await asyncio.sleep(0.05)
            ended.set()
            await empty(there.queue("mail"))
        assert (worker.done, worker.lost) == (1, 0)


async def test_a_job_whose_lease_expires_while_its_handler_runs_is_lost(where: Path) -> None:
    async with tidebook.open(where) as here, tidebook.open(where) as there:
        await here.queue("mail").put("x")
        await there.queue("mail").open()
        took: list[Job] = []

        async def handle(job: Job) -> None:
            await there.queue("mail").heartbeat(job, lease=0.001)  # as if no heartbeat had been sent for a long time
            async with asyncio.timeout(30):
                while not took:
                    took.extend(await there.queue("mail").claim())

        worker = Worker(here.queue("mail"), handle, concurrency=1, lease_s=60)
        await worker.run(once=True)
        assert (worker.done, worker.lost) == (0, 1)
        assert [job.timeouts for job in took] == [1]
        await there.queue("mail").done(took)


async def test_a_stop_lets_running_jobs_end_and_claims_no_more(book: tidebook.Book) -> None:
    queue, begun, go_on = book.queue("mail"), asyncio.Event(), asyncio.Event()

    async def handle(job: Job) -> None:
        begun.set()
        await go_on.wait()

    await queue.put_many(["first", "second"])
    worker = Worker(queue, handle, concurrency=1)
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(begun.wait(), 30)
    worker.stop()
    assert not (await asyncio.wait([running], timeout=0.1))[0]
    go_on.set()
    await asyncio.wait_for(running, 30)
    assert worker.done == 1
    assert [entry.data for entry in await queue.entries()] == ["second"]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("how", ["grace", "hurry"])
async def test_jobs_that_do_not_end_in_time_are_returned(book: tidebook.Book, blocking: bool, how: str) -> None:
    queue, begun, hangs = book.queue("mail"), threading.Event(), threading.Event()

    def handle(job: Job) -> None:
        begun.set()
        hangs.wait(60)

    async def handle_async(job: Job) -> None:
        begun.set()
        await asyncio.sleep(60)

    await queue.put("x")
    worker = Worker(queue, handle if blocking else handle_async, grace_s=0.05 if how == "grace" else 60.0)
    running = asyncio.create_task(worker.run())
    await until(begun.is_set)
    worker.stop()
    if how == "hurry":
        await asyncio.sleep(0)
        worker.stop()
    await asyncio.wait_for(running, 30)
    (entry,) = await queue.entries()
    assert (entry.status, entry.data, entry.timeouts) == ("W", "x", 1)
    hangs.set()


async def test_a_failing_entry_is_retried_and_becomes_a_dead_letter(book: tidebook.Book) -> None:
    queue, tries = book.queue("mail", settings=QueueSettings(max_timeouts=2)), list[int]()

    async def handle(job: Job) -> None:
        tries.append(job.timeouts)
        raise ValueError("no such address")

    await queue.put("x", key="k")
    async with working(queue, handle, retry=NO_REST) as worker:
        await empty(queue)
    assert tries == [0, 1, 2]
    assert worker.failed == 3
    (letter,) = await queue.dead_letters()
    assert (letter.key, letter.data, letter.timeouts, letter.reason) == ("k", "x", 3, "ValueError: no such address")


async def test_a_failed_entry_waits_as_its_policy_says(book: tidebook.Book) -> None:
    queue = book.queue("mail")

    def handle(job: Job) -> None:
        raise RuntimeError("down")

    await queue.put("x")
    await Worker(queue, handle, retry=Retry(first_s=500, spread=0.0)).run(once=True)
    (entry,) = await queue.entries()
    status = await queue.status()
    assert status.later == 1
    assert 400 < (entry.process_at - entry.inserted_at).total_seconds() < 600


async def test_stop_iteration_and_system_exit_fail_only_their_jobs(book: tidebook.Book) -> None:
    queue = book.queue("mail")

    def handle(job: Job) -> None:
        raise StopIteration if job.data == "a" else SystemExit(3)

    await queue.put_many(["a", "b"])
    worker = Worker(queue, handle, retry=Retry(first_s=100))
    await worker.run(once=True)
    assert (worker.done, worker.failed) == (0, 2)


async def test_entries_of_a_key_are_done_one_after_the_other_in_their_order(where: Path) -> None:
    async with tidebook.open(where) as here, tidebook.open(where) as there:
        running: dict[str | None, int] = defaultdict(int)
        seen: dict[str | None, list[int]] = defaultdict(list)

        async def handle(job: Job) -> None:
            running[job.key] += 1
            assert running[job.key] == 1
            seen[job.key].append(job.data)
            await asyncio.sleep(0.01)
            running[job.key] -= 1

        queue = here.queue("mail")
        async with working(queue, handle) as first, working(there.queue("mail"), handle) as second:
            for number in range(60):
                await queue.put(number, key=f"k{number % 3}")
            await empty(queue)
        assert first.failed + second.failed == 0
        for rest in range(3):
            numbers = seen[f"k{rest}"]
            assert numbers == sorted(set(numbers))
            assert numbers[-1] == 57 + rest


async def test_working_once_reports_that_the_store_is_unavailable(book: tidebook.Book) -> None:
    queue = book.queue("mail")

    async def gone(*_: object, **__: object) -> list[Job]:
        raise Unavailable("gone")

    queue.claim = gone  # type: ignore[method-assign]
    with pytest.raises(TidebookError, match="gone"):
        await Worker(queue, lambda job: None).run(once=True)


async def test_cancelling_a_worker_ends_its_handlers_and_returns_their_entries(book: tidebook.Book) -> None:
    queue, running = book.queue("mail"), set[object]()

    async def handle(job: Job) -> None:
        running.add(job.data)
        try:
            await asyncio.sleep(600)
        finally:
            running.discard(job.data)

    await queue.put_many(["a", "b"])
    working = asyncio.create_task(Worker(queue, handle).run())
    await until(lambda: len(running) == 2)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not running
    assert (await queue.status()).due == 2


async def test_a_running_worker_is_listed_with_its_jobs_and_removed_when_it_ends(where: Path) -> None:
    release = asyncio.Event()

    async def handle(job: Job) -> None:
        await release.wait()

    async with tidebook.open(where) as working, tidebook.open(where) as looking:
        await working.queue("mail").put_many([1, 2, 3])
        assert await looking.queue("mail").workers() == []
        async with working_two(working, handle) as (first, second):
            seen = looking.queue("mail")
            async with asyncio.timeout(60):
                while len(await seen.workers()) < 2 or (await seen.status()).processing < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            by_name = {each.name: each for each in await seen.workers()}
            assert set(by_name) == {"first", "second"}
            assert not any(each.gone for each in by_name.values())
            browser = await looking.queues.browser("mail")
            assert browser is not None
            held = await browser.claims()
            ids = {bytes.fromhex(each.id)[:8] for each in by_name.values()}
            assert {each.token[:8] for each in held} <= ids
            assert sum(each.entries for each in held) == 3
            release.set()
        assert (first.done + second.done) == 3
        assert await looking.queue("mail").workers() == []


@asynccontextmanager
async def working_two(book: tidebook.Book, handler: Handler) -> AsyncIterator[tuple[Worker, Worker]]:
    """Run two workers of one queue in one book: concurrent claims share a call of the store."""
    async with (
        working(book.queue("mail"), handler, concurrency=2, label="first") as first,
        working(book.queue("mail"), handler, concurrency=2, label="second") as second,
    ):
        yield first, second
