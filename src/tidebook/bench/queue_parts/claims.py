"""What a claim takes: with few and with many waiting entries, and after much work under a snapshot that is held."""

from __future__ import annotations

import asyncio
import statistics
import time

import psycopg

from tidebook.bench.queue_parts.figures import Run
from tidebook.bench.queue_sides.ours import Ours
from tidebook.bench.queue_sides.side import BATCH, PAYLOAD
from tidebook.bench.timing import timed
from tidebook.queue.queue import Queue

SCHEMA = "bench_tidebook"
FEW = 5_000
CLAIMS = 40
PERIODS = 10
#: As much as ends a period by default.
PERIOD_COUNT = 50_000
TURN_S_MAX = 30.0
#: Entries as `put` would make them: due, in five priorities.
_MANY = f"""INSERT INTO {SCHEMA}.entry
    (id, process_at, expires_at, inserted_at, queue, slot, priority, kind, keyhash, data)
    SELECT n, 1700000000000 + n / 7, 9223372036854775807, 1700000000000, %s, 0, 50 + 10 * (n %% 5), 2,
        ('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, %s
    FROM generate_series(%s::bigint, %s::bigint) AS n"""


async def many(run: Run, waiting: int) -> None:
    """A claim of a hundred while five thousand entries wait, and while five million do."""
    for name, count in (("few", FEW), ("many", waiting)):
        ours = Ours(run.url, schema=SCHEMA)
        await ours.open()
        try:
            with timed(f"{count:,} entries are made"):
                await _make(run.url, ours.queue, count)
            await claim_ms(ours.queue, 5)
            run.figures[f"claim_{name}_ms"] = await claim_ms(ours.queue, CLAIMS)
            run.figures[f"claim_{name}_entries"] = count
        finally:
            await ours.close()


async def _make(url: str, queue: Queue, count: int) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        cursor = await connection.execute(f"SELECT id FROM {SCHEMA}.queue WHERE name = %s", (queue.name,))
        row = await cursor.fetchone()
        assert row is not None, "it was opened"
        for first in range(1, count, 500_000):
            await connection.execute(_MANY, (row[0], PAYLOAD, first, min(first + 499_999, count)))
        await connection.execute(f"VACUUM ANALYZE {SCHEMA}.entry")
        await connection.execute("CHECKPOINT")


async def churn(run: Run) -> None:
    """Ten periods are put and worked off while a transaction elsewhere keeps its snapshot; then most of another one."""
    ours = Ours(run.url, schema=SCHEMA)
    await ours.open()
    try:
        await ours.put(FEW, tasks=1)
        await claim_ms(ours.queue, 5)
        run.figures["claim_fresh_ms"] = await claim_ms(ours.queue, CLAIMS)
        async with await psycopg.AsyncConnection.connect(run.url) as holding:
            await holding.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await holding.execute("SELECT count(*) FROM pg_class")
            for number in range(PERIODS):
                with timed(f"period {number + 1} of {PERIODS} under a held snapshot"):
                    await ours.put(PERIOD_COUNT, tasks=4)
                    await ours.drain(connections=2)
                    await _turned(run.url)
            await ours.put(FEW, tasks=1)
            await claim_ms(ours.queue, 5)
            run.figures["claim_churned_ms"] = await claim_ms(ours.queue, CLAIMS)
            await ours.put(PERIOD_COUNT * 4 // 5, tasks=4)
            await ours.drain(connections=2)
            await ours.put(FEW, tasks=1)
            await claim_ms(ours.queue, 5)
            run.figures["claim_late_in_period_ms"] = await claim_ms(ours.queue, CLAIMS)
    finally:
        await ours.close()


async def _turned(url: str) -> None:
    """Return when the keeper has noticed that a period's worth is finished, and begun the next one."""
    async with asyncio.timeout(TURN_S_MAX), await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        while True:
            cursor = await connection.execute(f"SELECT max(finished) FROM {SCHEMA}.period")
            row = await cursor.fetchone()
            if row is not None and row[0] < PERIOD_COUNT // 2:
                return
            await asyncio.sleep(0.02)


async def claim_ms(queue: Queue, count: int) -> float:
    """The median of so many claims of a hundred; each is finished before the next."""
    taken: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        jobs = await queue.claim(BATCH)
        taken.append((time.perf_counter() - began) * 1000)
        if len(jobs) != BATCH:
            raise AssertionError(f"a claim brought {len(jobs)} entries, not {BATCH}")
        await queue.done(jobs)
    return statistics.median(taken)
