"""The latency of wake-ups: from a put in another process to the claim by an idle worker, and at process dates."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from contextlib import aclosing
from datetime import UTC, datetime

import tidebook
from bench.queue_parts.figures import Run
from bench.queue_sides.ours import Ours
from bench.queue_sides.pgqueuer import PgQueuer
from bench.timing import percentile, timed
from tidebook.queue.entry import Entry
from tidebook.queue.queue import Queue

PAUSE_S = 0.05
IDLE, IDLE_ROUNDS = 400, 4
TIMERS = 10_000
#: The timers are due one after another, this many per second.
TIMERS_PER_S = 100.0
TIMERS_S = 20.0


async def idle(run: Run) -> None:
    """Measure the latency of single entries without other load, on both queues in turn."""
    count = run.scaled(IDLE) // IDLE_ROUNDS
    ours, theirs = Ours(run.url), PgQueuer(run.url)
    our_ms: list[float] = []
    their_ms: list[float] = []
    for _ in range(IDLE_ROUNDS):
        await theirs.open()
        with timed(f"pgqueuer: idle wake-up, {count} times"):
            their_ms += await theirs.latencies_ms(count, PAUSE_S)
        await theirs.close()
        await ours.open()
        with timed(f"tidebook: idle wake-up, {count} times"):
            our_ms += await _latencies_ms(ours, count)
        await ours.close()
    _keep(run, "pgqueuer_idle", their_ms)
    _keep(run, "tidebook_idle", our_ms)


async def _latencies_ms(ours: Ours, count: int) -> list[float]:
    """Return latencies from the put in one book to the claim in another, which share only the database."""
    put_at_s: dict[str, float] = {}
    found: list[float] = []
    arrived = asyncio.Event()

    async def work(queue: Queue) -> None:
        async with aclosing(queue.listen()) as dues:
            async for _ in dues:
                while jobs := await queue.claim(10):
                    for job in jobs:
                        found.append((time.perf_counter() - put_at_s[job.data]) * 1000)
                    arrived.set()
                    await queue.done(jobs)

    async with tidebook.open(ours.settings()) as other:
        working = asyncio.create_task(work(ours.queue))
        putting = await other.queue("bench").open()
        await asyncio.sleep(1)
        for number in range(count):
            put_at_s[f"{number}"] = time.perf_counter()
            await putting.put(f"{number}")
            await asyncio.wait_for(arrived.wait(), 60)
            arrived.clear()
            await asyncio.sleep(PAUSE_S)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return found


async def timers(run: Run) -> None:
    """Measure how long after its process date an entry wakes a listener, and is claimed by a worker."""
    ours = Ours(run.url)
    await ours.open()
    measured_s = TIMERS_S / 10 if run.quick else TIMERS_S
    first = time.time() + 5.0
    dates = [round(first + number / TIMERS_PER_S, 3) for number in range(TIMERS)]
    for at in range(0, TIMERS, 1000):
        await ours.queue.put_many(
            [Entry(data=n, process_at=datetime.fromtimestamp(dates[n], UTC)) for n in range(at, at + 1000)]
        )
    until = first + measured_s
    with timed(f"tidebook: {TIMERS:,} timers, {measured_s:.0f} s of them"):
        wakes, late = await asyncio.gather(_wakes(ours.queue, until), _late_ms(ours.queue, until))
    await ours.close()
    _keep(run, "timer_claimed", late)
    # a timer may be early by a fraction of a millisecond
    late_ms = [(wakes[bisect_left(wakes, date - 0.001)] - date) * 1000 for date in dates if date < until]
    _keep(run, "timer", late_ms)


async def _wakes(queue: Queue, until: float) -> list[float]:
    """Return the times at which a listener is woken, up to the first after `until`."""
    wakes: list[float] = []
    async with aclosing(queue.listen()) as dues:
        async for _ in dues:
            wakes.append(time.time())
            if wakes[-1] > until:
                break
    return wakes


async def _late_ms(queue: Queue, until: float) -> list[float]:
    """Return how late a worker has claimed each entry if it claims whenever it is woken."""
    late: list[float] = []
    async with aclosing(queue.listen()) as dues:
        async for _ in dues:
            while jobs := await queue.claim(100):
                now = time.time()
                late += [(now - job.process_at.timestamp()) * 1000 for job in jobs]
                await queue.done(jobs)
            if time.time() > until:
                break
    return late


def _keep(run: Run, name: str, taken_ms: list[float]) -> None:
    run.figures[f"{name}_p50_ms"] = percentile(taken_ms, 0.5)
    run.figures[f"{name}_p99_ms"] = percentile(taken_ms, 0.99)
