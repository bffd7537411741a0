"""The queue in a folder compared with huey on SQLite; every commit is synced."""

from __future__ import annotations

import asyncio
from functools import partial

from bench.queue_parts.figures import Run, fill, rate_of
from bench.queue_sides.huey import Huey
from bench.queue_sides.ours import Ours

#: Both queues process one entry at a time; the best number of workers of each is reported.
WORKERS = (20, 100)
HUEY_THREADS = (1, 4, 20)
HUEY_COUNT, SINGLES, BATCHED = 1_000, 4_000, 10_000
#: Rounds are short and alternate, and the best of each is reported, so that other load does not favour either queue.
ROUNDS = 8


async def embedded(run: Run) -> None:
    """Measure one entry at a time on both queues, and batches of 100, for which huey has no call."""
    huey, ours = Huey(), Ours(None)
    await ours.open()
    try:
        for _ in range(ROUNDS):
            for threads in HUEY_THREADS:
                await _huey(run, huey, threads)
            for workers in WORKERS:
                await _singles(run, ours, workers)
            await _hundreds(run, ours)
    finally:
        await ours.close()
        huey.close()


async def _huey(run: Run, side: Huey, threads: int) -> None:
    count = run.scaled(HUEY_COUNT)
    rate = await rate_of(f"huey: put {count:,}", count, partial(asyncio.to_thread, side.put, count))
    run.keep_best("huey_put_per_s", rate)
    what = f"huey: {count:,} one at a time, {threads} threads"
    rate = await rate_of(what, count, partial(asyncio.to_thread, side.drain, threads=threads))
    run.keep_best(f"huey_singles_{threads}_per_s", rate)
    run.keep_best("huey_singles_per_s", rate)


async def _singles(run: Run, side: Ours, workers: int) -> None:
    """Measure claim and finish of one entry at a time; huey deletes a task when it is taken."""
    count = run.scaled(SINGLES)
    await fill(side, count)
    what = f"embedded: {count:,} one at a time, {workers} workers"
    rate = await rate_of(what, count, partial(side.singles, workers=workers))
    run.keep_best(f"embedded_singles_{workers}_per_s", rate)
    run.keep_best("embedded_singles_per_s", rate)


async def _hundreds(run: Run, side: Ours) -> None:
    count = run.scaled(BATCHED)
    run.keep_best("embedded_put_per_s", await fill(side, count))
    what = f"embedded: drain {count:,} in batches of 100"
    run.keep_best("embedded_drain_per_s", await rate_of(what, count, partial(side.drain, connections=2)))
