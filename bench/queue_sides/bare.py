"""A bare loop as reference: a table with a primary key, and a delete that skips rows that others have locked."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg

from bench.queue_sides.side import BATCH, PAYLOAD

_DELETE = """DELETE FROM bench_bare WHERE id IN (SELECT id FROM bench_bare ORDER BY id LIMIT {} FOR UPDATE SKIP LOCKED)
    RETURNING id, data"""


class Bare:
    """The fastest queue that PostgreSQL allows: without leases, priorities or dates."""

    name = "bare"

    def __init__(self, url: str) -> None:
        self._url = url

    async def open(self) -> None:
        await self._run("DROP TABLE IF EXISTS bench_bare")
        await self._run(
            "CREATE TABLE bench_bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data bytea NOT NULL)"
        )

    async def put(self, count: int, *, tasks: int) -> None:
        async def some(batches: int) -> None:
            async with await self._connect() as connection:
                for _ in range(batches):
                    await connection.execute(
                        "INSERT INTO bench_bare (data) SELECT unnest(%b::bytea[])", ([PAYLOAD] * BATCH,)
                    )

        await asyncio.gather(*(some(count // BATCH // tasks) for _ in range(tasks)))

    async def drain(self, *, connections: int) -> int:
        return sum(await asyncio.gather(*(self._delete(BATCH) for _ in range(connections))))

    async def singles(self, *, workers: int) -> int:
        return sum(await asyncio.gather(*(self._delete(1) for _ in range(workers))))

    async def close(self) -> None:
        await self._run("DROP TABLE IF EXISTS bench_bare")

    async def _delete(self, batch: int) -> int:
        done = 0
        async with await self._connect() as connection:
            cursor = connection.cursor(binary=True)
            while True:
                await cursor.execute(_DELETE.format(batch))
                rows = await cursor.fetchall()
                if not rows:
                    return done
                done += len(rows)

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(self._url, autocommit=True, prepare_threshold=1)

    async def _run(self, sql: str) -> None:
        async with await self._connect() as connection:
            await connection.execute(sql)
