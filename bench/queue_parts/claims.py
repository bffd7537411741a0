"""The time of a claim: while few or many entries wait, and after much work under a long-lived snapshot."""

from __future__ import annotations

import asyncio
import statistics
import time

import psycopg

from bench.queue_parts.figures import Run
from bench.queue_sides.ours import Ours
from bench.queue_sides.side import BATCH, PAYLOAD
from bench.timing import timed
from tidebook.queue.queue import Queue

SCHEMA = "bench_tidebook"
FEW = 5_000
#: The measured claims of each side, and the warm-up claims before them.
CLAIMS, WARM_UP = 40, 5
PERIODS = 10
#: The number of finished entries that ends a period by default.
PERIOD_COUNT = 50_000
PERIOD_S_MAX = 30.0
#: Inserts due entries as `put` would, with five priorities.
_MANY = """INSERT INTO {schema}.entry
    (id, process_at, expires_at, inserted_at, queue, slot, priority, kind, keyhash, data)
    SELECT n, 1700000000000 + n / 7, 9223372036854775807, 1700000000000, %s, 0, 50 + 10 * (n %% 5), 2,
        ('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, %s
    FROM generate_series(%s::bigint, %s::bigint) AS n"""


async def many(run: Run, waiting: int) -> None:
    """Measure claims of 100, alternately while 5,000 entries wait and while 5,000,000 wait."""
    few, many = Ours(run.url, schema=f"{SCHEMA}_few"), Ours(run.url, schema=f"{SCHEMA}_many")
    for side, count in ((few, FEW), (many, waiting)):
        await side.open()
        with timed(f"{count:,} entries are made"):
            await _make(run.url, side, count)
    try:
        run.figures["claim_few_ms"], run.figures["claim_many_ms"] = await _in_turn(few, many)
        run.figures["claim_few_entries"], run.figures["claim_many_entries"] = FEW, waiting
    finally:
        await many.close()
        await few.close()


async def _make(url: str, side: Ours, count: int) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        cursor = await connection.execute(f"SELECT id FROM {side.schema}.queue WHERE name = %s", (side.queue.name,))
        row = await cursor.fetchone()
        assert row is not None, "the queue was opened"
        for first in range(1, count, 500_000):
            rows = (row[0], PAYLOAD, first, min(first + 499_999, count))
            await connection.execute(_MANY.format(schema=side.schema), rows)
        await connection.execute(f"VACUUM ANALYZE {side.schema}.entry")
        await connection.execute("CHECKPOINT")


async def churn(run: Run, fresh_url: str) -> None:
    """Put and finish ten periods of entries, then most of another one, while a transaction keeps its snapshot.

    Claims from this queue alternate with claims from a fresh one. The fresh one is in another database, which the
    snapshot does not affect, so that its finished entries can be vacuumed.
    """
    fresh, churned = Ours(fresh_url, schema=SCHEMA), Ours(run.url, schema=SCHEMA)
    await fresh.open()
    await churned.open()
    try:
        async with await psycopg.AsyncConnection.connect(run.url) as holding:
            await holding.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await holding.execute("SELECT count(*) FROM pg_class")
            for number in range(PERIODS):
                with timed(f"period {number + 1} of {PERIODS} under a held snapshot"):
                    await churned.put(PERIOD_COUNT, tasks=4)
                    await churned.drain(connections=2)
                    await _next_period(run.url)
            taken = await _filled_in_turn(fresh, churned)
            run.figures["claim_fresh_ms"], run.figures["claim_churned_ms"] = taken
            await churned.put(PERIOD_COUNT * 4 // 5, tasks=4)
            await churned.drain(connections=2)
            taken = await _filled_in_turn(fresh, churned)
            run.figures["claim_fresh_again_ms"], run.figures["claim_late_in_period_ms"] = taken
    finally:
        await churned.close()
        await fresh.close()


async def _filled_in_turn(*sides: Ours) -> list[float]:
    for side in sides:
        await side.put(FEW, tasks=1)
    taken = await _in_turn(*sides)
    for side in sides:
        await side.drain(connections=1)
    return taken


async def _in_turn(*sides: Ours) -> list[float]:
    """Return the median claim time of each queue; the claims alternate."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(WARM_UP + CLAIMS):
        for side, times in zip(sides, taken, strict=True):
            times.append(await _claim_ms(side.queue))
    return [statistics.median(times[WARM_UP:]) for times in taken]


async def _next_period(url: str) -> None:
    """Wait until the queue's maintenance has begun the next period."""
    async with asyncio.timeout(PERIOD_S_MAX), await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        while True:
            cursor = await connection.execute(f"SELECT max(finished) FROM {SCHEMA}.period")
            row = await cursor.fetchone()
            if row is not None and row[0] < PERIOD_COUNT // 2:
                return
            await asyncio.sleep(0.02)


async def _claim_ms(queue: Queue) -> float:
    """Return the time of a claim of a hundred entries, and finish them."""
    began = time.perf_counter()
    jobs = await queue.claim(BATCH)
    taken_ms = (time.perf_counter() - began) * 1000
    if len(jobs) != BATCH:
        raise AssertionError(f"a claim returned {len(jobs)} entries, not {BATCH}")
    await queue.done(jobs)
    return taken_ms
