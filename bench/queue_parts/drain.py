"""Drain a queue: claim and finish batches of 100 on up to four connections, and single entries with twenty workers."""

from __future__ import annotations

from functools import partial

import psycopg

from bench.queue_parts.figures import Run, fill, rate_of
from bench.queue_sides.bare import Bare
from bench.queue_sides.ours import Ours
from bench.queue_sides.pgmq import Pgmq
from bench.queue_sides.pgqueuer import PgQueuer, PgQueuerManaged
from bench.queue_sides.procrastinate import Procrastinate
from bench.queue_sides.side import Side

CONNECTIONS = (2, 4)
WORKERS = 20
ROUNDS = 3
#: How many jobs a dequeue of pgqueuer takes; the best result is reported. 100 was slower, 2,000 no faster.
PGQUEUER_BATCHES = (500, 1_000)
COUNT, SINGLES = 50_000, 4_000
#: A procrastinate job takes the same time whatever the number of jobs, and 50,000 would take minutes.
PROCRASTINATE_COUNT = 2_000


async def drain(run: Run) -> None:
    """Measure all queues in turn and keep the best round of each. Tidebook runs as many times as pgqueuer."""
    count = run.scaled(COUNT)
    sides: list[Side] = [Bare(run.url), Pgmq(run.url)]
    for batch in PGQUEUER_BATCHES:
        sides += [Ours(run.url), PgQueuer(run.url, batch=batch)]
    for _ in range(1 if run.quick else ROUNDS):
        for side in sides:
            for connections in CONNECTIONS:
                await _drain_once(run, side, count, connections)
        await _drain_once(run, Procrastinate(run.url), run.scaled(PROCRASTINATE_COUNT), 4)


async def _analyze(url: str) -> None:
    """Analyze tables, as autovacuum would within a minute; otherwise some queries are planned for empty tables."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("ANALYZE")


async def _drain_once(run: Run, side: Side, count: int, connections: int) -> None:
    await side.open()
    try:
        run.keep_best(f"{side.name}_put_per_s", await fill(side, count))
        await _analyze(run.url)
        what = f"{side.name}: drain {count:,} with {connections} connections"
        rate = await rate_of(what, count, partial(side.drain, connections=connections))
        run.keep_best(f"{side.name}_drain_{connections}_per_s", rate)
        run.keep_best(f"{side.name}_drain_per_s", rate)
    finally:
        await side.close()


async def singles(run: Run) -> None:
    """Measure twenty workers that claim and finish single entries; for pgqueuer, the better of loops and manager."""
    count = run.scaled(SINGLES)
    sides: list[Side] = [PgQueuer(run.url), PgQueuerManaged(run.url), Ours(run.url), Bare(run.url)]
    for _ in range(1 if run.quick else ROUNDS):
        for side in sides:
            await side.open()
            try:
                await fill(side, count)
                await _analyze(run.url)
                what = f"{side.name}: {count:,} one at a time, {WORKERS} workers"
                rate = await rate_of(what, count, partial(side.singles, workers=WORKERS))
                run.keep_best(f"{side.name}_singles_per_s", rate)
            finally:
                await side.close()
