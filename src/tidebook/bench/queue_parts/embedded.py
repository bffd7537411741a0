"""The queue in a folder beside huey on SQLite: one at a time, every commit synchronized."""

from __future__ import annotations

import asyncio
from functools import partial

from tidebook.bench.queue_parts.figures import Run, fill, rate_of
from tidebook.bench.queue_sides.huey import Huey
from tidebook.bench.queue_sides.ours import Ours

WORKERS = 20
HUEY_THREADS = (1, 4)
HUEY_COUNT, SINGLES, BATCHED = 4_000, 20_000, 50_000
ROUNDS = 2


async def embedded(run: Run) -> None:
    """huey's tasks come one at a time; so do ours, by twenty workers, and in hundreds beside."""
    for _ in range(1 if run.quick else ROUNDS):
        for threads in HUEY_THREADS:
            await _huey(run, threads)
        await _ours(run)


async def _huey(run: Run, threads: int) -> None:
    count, side = run.few(HUEY_COUNT), Huey()
    try:
        rate = await rate_of(f"huey: put {count:,}", count, partial(asyncio.to_thread, side.put, count))
        run.keep_best("huey_put_per_s", rate)
        what = f"huey: drain {count:,}, {threads} at one time"
        rate = await rate_of(what, count, partial(asyncio.to_thread, side.drain, threads=threads))
        run.keep_best("huey_drain_per_s", rate)
    finally:
        side.close()


async def _ours(run: Run) -> None:
    side = Ours(None)
    await side.open()
    try:
        count = run.few(SINGLES)
        await fill(side, count)
        what = f"embedded: {count:,} one at a time, {WORKERS} workers"
        run.keep_best("embedded_singles_per_s", await rate_of(what, count, partial(side.singles, workers=WORKERS)))
        count = run.few(BATCHED)
        run.keep_best("embedded_put_per_s", await fill(side, count))
        what = f"embedded: drain {count:,} in hundreds"
        run.keep_best("embedded_drain_per_s", await rate_of(what, count, partial(side.drain, connections=2)))
    finally:
        await side.close()
