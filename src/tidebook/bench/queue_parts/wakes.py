"""Wake-ups: from a put elsewhere to the hands of a worker with nothing to do, and at process dates."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from datetime import UTC, datetime

import tidebook
from tidebook.bench.queue_parts.figures import Run
from tidebook.bench.queue_sides.ours import Ours
from tidebook.bench.queue_sides.pgqueuer import PgQueuer
from tidebook.bench.timing import percentile, timed
from tidebook.queue.entry import Entry
from tidebook.queue.queue import Queue

PAUSE_S = 0.05
IDLE = 200
TIMERS = 10_000
#: The first of the timers go off soon, this many a second; the others lie behind them.
TIMERS_PER_S = 100.0
TIMERS_S = 20.0


async def idle(run: Run) -> None:
    """Nothing else goes on: what one entry takes."""
    count = run.few(IDLE)
    ours, theirs = Ours(run.url), PgQueuer(run.url)
    await theirs.open()
    with timed(f"pgqueuer: idle wake-up, {count} times"):
        taken = await theirs.latencies_ms(count, PAUSE_S)
    await theirs.close()
    _keep(run, "pgqueuer_idle", taken)
    await ours.open()
    with timed(f"tidebook: idle wake-up, {count} times"):
        taken = await _latencies_ms(ours, count)
    await ours.close()
    _keep(run, "tidebook_idle", taken)


async def _latencies_ms(ours: Ours, count: int) -> list[float]:
    """From the put in one book to the claim in another, which share the database alone."""
    begun: dict[str, float] = {}
    found: list[float] = []
    arrived = asyncio.Event()

    async def work(queue: Queue) -> None:
        async with aclosing(queue.listen()) as dues:
            async for _ in dues:
                while jobs := await queue.claim(10):
                    for job in jobs:
                        found.append((time.perf_counter() - begun[job.data]) * 1000)
                    arrived.set()
                    await queue.done(jobs)

    async with tidebook.open(ours.settings()) as other:
        working = asyncio.create_task(work(ours.queue))
        putting = await other.queue("bench").open()
        await asyncio.sleep(1)
        for number in range(count):
            begun[f"{number}"] = time.perf_counter()
            await putting.put(f"{number}")
            await asyncio.wait_for(arrived.wait(), 60)
            arrived.clear()
            await asyncio.sleep(PAUSE_S)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return found


async def timers(run: Run) -> None:
    """Ten thousand process dates; how late the listener is woken for each, and how late it has the entry."""
    ours = Ours(run.url)
    await ours.open()
    queue = ours.queue
    measured_s = TIMERS_S / 10 if run.quick else TIMERS_S
    first = time.time() + 3.0
    dates = [first + number / TIMERS_PER_S for number in range(TIMERS)]
    for at in range(0, TIMERS, 1000):
        await queue.put_many(
            [
                Entry(data=number, process_at=datetime.fromtimestamp(dates[number], UTC))
                for number in range(at, at + 1000)
            ]
        )
    woken: list[float] = []
    late: list[float] = []
    with timed(f"tidebook: {TIMERS:,} timers, {measured_s:.0f} s of them"):
        async with aclosing(queue.listen()) as dues:
            async for _ in dues:
                now = time.time()
                while jobs := await queue.claim(100):
                    then = time.time()
                    woken += [(now - job.process_at.timestamp()) * 1000 for job in jobs]
                    late += [(then - job.process_at.timestamp()) * 1000 for job in jobs]
                    await queue.done(jobs)
                if len(late) >= measured_s * TIMERS_PER_S:
                    break
    await ours.close()
    _keep(run, "timer_claimed", late)
    # an entry that came with another's wake-up was not woken for: its own moment is when it was claimed
    _keep(run, "timer", [wake if wake >= 0 else claim for wake, claim in zip(woken, late, strict=True)])


def _keep(run: Run, name: str, taken_ms: list[float]) -> None:
    run.figures[f"{name}_p50_ms"] = percentile(taken_ms, 0.5)
    run.figures[f"{name}_p99_ms"] = percentile(taken_ms, 0.99)
