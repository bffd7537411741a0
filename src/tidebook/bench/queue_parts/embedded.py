"""The queue in a folder beside huey on SQLite, every commit synchronized."""

from __future__ import annotations

import asyncio
from functools import partial

from tidebook.bench.queue_parts.figures import Run, fill, rate_of
from tidebook.bench.queue_sides.huey import Huey
from tidebook.bench.queue_sides.ours import Ours

WORKERS = 20
HUEY_THREADS = (1, 4)
HUEY_COUNT, SINGLES, BATCHED = 1_000, 4_000, 10_000
#: Short ones, by turns: what else the machine does in a moment is nobody's merit, and the best of each counts.
ROUNDS = 8


async def embedded(run: Run) -> None:
    """huey knows no batches, so its tasks come one at a time; ours in hundreds, and one at a time."""
    huey, ours = Huey(), Ours(None)
    await ours.open()
    try:
        for _ in range(ROUNDS):
            for threads in HUEY_THREADS:
                await _huey(run, huey, threads)
            await _ours(run, ours)
    finally:
        await ours.close()
        huey.close()


async def _huey(run: Run, side: Huey, threads: int) -> None:
    count = run.few(HUEY_COUNT)
    rate = await rate_of(f"huey: put {count:,}", count, partial(asyncio.to_thread, side.put, count))
    run.keep_best("huey_put_per_s", rate)
    what = f"huey: drain {count:,}, {threads} at one time"
    rate = await rate_of(what, count, partial(asyncio.to_thread, side.drain, threads=threads))
    run.keep_best("huey_drain_per_s", rate)


async def _ours(run: Run, side: Ours) -> None:
    count = run.few(SINGLES)
    await fill(side, count)
    what = f"embedded: {count:,} one at a time, {WORKERS} workers"
    run.keep_best("embedded_singles_per_s", await rate_of(what, count, partial(side.singles, workers=WORKERS)))
    count = run.few(BATCHED)
    run.keep_best("embedded_put_per_s", await fill(side, count))
    what = f"embedded: drain {count:,} in hundreds"
    run.keep_best("embedded_drain_per_s", await rate_of(what, count, partial(side.drain, connections=2)))
