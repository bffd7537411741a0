"""Single faults of queues: a worker stopped past its lease, wrong clocks, thousands of timers, duplicates."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tidebook
import tidebook.queue
from tidebook.queue.job import Job
from tidebook.queue.queue import Queue
from tidebook.testing.servers import Postgres

pytestmark = pytest.mark.postgres
CASE_TIMEOUT_S = 60
LEASE_S = 0.5

#: Claims entries and prints them; then calls the method named by each input line on them, and prints the outcome.
HOLDER = """
import asyncio, json, sys, time
book, lease_s, off_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
if off_s:
    was, was_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: was() + off_s, lambda: was_ns() + int(off_s * 1e9)
import tidebook
import tidebook.queue
from tidebook.core.errors import TidebookError

def report(**config):
    print(json.dumps(config), flush=True)

async def main():
    async with tidebook.open(book) as opened:
        queue = opened.queue("mail")
        jobs = await queue.claim(10, lease=lease_s)
        report(data=[job.data for job in jobs], timeouts=[job.timeouts for job in jobs])
        for call in sys.stdin:
            try:
                await getattr(queue, call.strip())(jobs)
                report(outcome="ok")
            except TidebookError as error:
                report(outcome=type(error).__name__)

asyncio.run(main())
"""


class Holder:
    """A worker in a separate process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        received: dict[str, Any] = json.loads(self.process.stdout.readline())
        return received

    def call(self, name: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        return str(self.receive()["outcome"])


@contextmanager
def holder(where: Path, *, lease_s: float = LEASE_S, off_s: float = 0) -> Iterator[Holder]:
    command = [sys.executable, "-c", HOLDER, str(where), str(lease_s), str(off_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Holder(process)
        finally:
            os.kill(process.pid, signal.SIGKILL)


async def taken_over(queue: Queue) -> list[Job]:
    """Claim until an entry is due."""
    async with asyncio.timeout(CASE_TIMEOUT_S):
        while not (jobs := await queue.claim(10, lease=60)):  # noqa: ASYNC110  a process that died reports nothing
            await asyncio.sleep(0.02)
    return jobs


async def test_a_worker_stopped_past_its_lease_cannot_finish_an_entry_of_another(where: Path) -> None:
    async with tidebook.open(where) as book:
        queue = book.queue("mail")
        await queue.put("x", key="k")
        with holder(where) as stopped:
            assert stopped.receive() == {"data": ["x"], "timeouts": [0]}
            # In a folder, a process stopped with the write lock would block all others; this put shows it has none.
            await queue.put("later", process_at=datetime.now(UTC) + timedelta(hours=1))
            stopped.process.send_signal(signal.SIGSTOP)
            (job,) = await taken_over(queue)
            assert job.timeouts == 1
            stopped.process.send_signal(signal.SIGCONT)
            outcomes = [await asyncio.to_thread(stopped.call, name) for name in ("heartbeat", "fail", "done")]
        assert outcomes == ["LeaseLost"] * 3
        await queue.done(job)
        assert (await queue.status()).processing == 0


async def test_a_worker_stopped_past_its_lease_may_finish_an_entry_that_no_other_has_claimed(where: Path) -> None:
    async with tidebook.open(where) as book:
        await book.queue("mail").put("x")
        with holder(where, lease_s=0.1) as stopped:
            stopped.receive()
            stopped.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            stopped.process.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(stopped.call, "done") == "ok"
        status = await book.queue("mail").status()
        assert (status.waiting, status.processing) == (0, 0)


async def test_the_entries_of_a_killed_worker_are_claimed_again_with_a_timeout_counted(where: Path) -> None:
    async with tidebook.open(where) as book:
        queue = book.queue("mail")
        await queue.put_many(["x", "y"])
        with holder(where) as killed:
            assert killed.receive()["data"] == ["x", "y"]
        jobs = await taken_over(queue)
        assert [(job.data, job.timeouts) for job in jobs] == [("x", 1), ("y", 1)]


@pytest.mark.parametrize("off_s", [-3_600, 3_600])
async def test_a_worker_whose_clock_is_off_by_an_hour_takes_nothing_early_and_holds_what_it_took(
    settings_file: Path, off_s: int
) -> None:
    async with tidebook.open(settings_file) as book:
        queue = book.queue("mail")
        await queue.put("due")
        await queue.put("held")
        (held,) = [job for job in await queue.claim(2, lease=60) if job.data == "held"]
        await queue.put("later", process_at=datetime.now(UTC) + timedelta(minutes=30))
        await queue.put("expires", expires_at=datetime.now(UTC) + timedelta(minutes=30))
        with holder(settings_file, lease_s=30, off_s=off_s) as off:
            assert off.receive()["data"] == ["expires"]
            assert await queue.claim(10) == []
            assert await asyncio.to_thread(off.call, "heartbeat") == "ok"
            assert await queue.claim(10) == []
            assert await asyncio.to_thread(off.call, "done") == "ok"
        await queue.done(held)


@pytest.mark.timeout(300)
async def test_ten_thousand_timers_fire_each_at_its_date(where: Path, long_form: bool) -> None:
    count, over_s = (10_000, 20.0) if long_form else (10_000, 2.5)
    async with tidebook.open(where) as book, tidebook.open(where) as putter:
        begin = datetime.now(UTC) + timedelta(seconds=3)
        dates = [begin + timedelta(seconds=over_s * number / count) for number in range(count)]
        queue, other = book.queue("timers"), putter.queue("timers")
        done: list[Job] = []

        async def work() -> None:
            async for _ in queue.listen():
                while jobs := await queue.claim(500, lease=60):
                    done.extend(jobs)
                    await queue.done(jobs)
                    if len(done) == count:
                        return

        working = asyncio.create_task(work())
        entry = tidebook.queue.Entry
        for at in range(0, count, 1_000):
            await other.put_many([entry(data=n, process_at=dates[n]) for n in range(at, at + 1_000)])
        await asyncio.wait_for(working, 240)
        assert sorted(job.data for job in done) == list(range(count))
        assert all(job.started_at >= job.process_at for job in done)
        late_s = sorted((job.started_at - job.process_at).total_seconds() for job in done)
        print(f"late by {late_s[count // 2]:.4f} s (median), {late_s[count * 99 // 100]:.4f} s (99th percentile)")
        assert late_s[count // 2] < 2, "the slow poll found the timers"


async def test_repeated_puts_of_waiting_entries_are_merged(where: Path) -> None:
    async with tidebook.open(where) as book, tidebook.open(where) as other:
        entry = tidebook.queue.Entry
        entries = [entry(data=number, key=f"k{number}") for number in range(50)]
        puts = [each.queue("mail").put_many(entries) for each in (book, other) for _ in range(5)]
        reported = await asyncio.gather(*puts)
        assert sum(put.inserted for put in reported) == 50
        assert sum(put.merged for put in reported) == 450
        jobs = await book.queue("mail").claim(100)
        assert sorted(job.data for job in jobs) == list(range(50))


async def test_a_listener_and_a_worker_survive_a_restart_of_the_database(
    settings_file: Path, own_postgres: Postgres
) -> None:
    async with tidebook.open(settings_file) as book:
        queue, seen = book.queue("mail"), asyncio.Event()

        async def handle(job: Job) -> None:
            if job.data == "after":
                seen.set()

        worker = tidebook.queue.Worker(queue, handle)
        await queue.put("before")
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(CASE_TIMEOUT_S):
            while worker.done == 0:  # noqa: ASYNC110  nothing else reports it
                await asyncio.sleep(0.01)
        await asyncio.to_thread(own_postgres.kill9)
        await asyncio.to_thread(own_postgres.start)
        async with tidebook.open(settings_file) as other:
            await other.queue("mail").put("after")
        await asyncio.wait_for(seen.wait(), CASE_TIMEOUT_S)
        worker.stop()
        await asyncio.wait_for(running, CASE_TIMEOUT_S)


async def test_entries_survive_a_crash_of_the_database(settings_file: Path, own_postgres: Postgres) -> None:
    async with tidebook.open(settings_file) as book:
        await book.queue("mail").put_many(list(range(100)))
        (held,) = await book.queue("mail").claim(lease=120)
    await asyncio.to_thread(own_postgres.kill9)
    await asyncio.to_thread(own_postgres.start)
    began = time.monotonic()
    async with tidebook.open(settings_file) as book:
        jobs = await book.queue("mail").claim(200)
        assert sorted(job.data for job in jobs) == sorted(set(range(100)) - {held.data})
        await book.queue("mail").done(held)
        assert time.monotonic() - began < 120
