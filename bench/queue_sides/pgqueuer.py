"""The peer pgqueuer, through its queries and its manager, on asyncpg.

With psycopg, its manager waits for notifications on its query connection, and a wake-up takes a second.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.core.qm import QueueManager
from pgqueuer.ports.repository import EntrypointExecutionParameter
from pgqueuer.types import QueueExecutionMode

from bench.queue_sides.side import BATCH, PAYLOAD

_ENTRY = "bench"


class PgQueuer:
    """pgqueuer through `dequeue` and `log_jobs`, in batches or one at a time; wake-ups use its manager."""

    name = "pgqueuer"

    def __init__(self, url: str, *, batch: int = BATCH) -> None:
        self._url = url
        self._batch = batch
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        queries = await self._queries()
        if await queries.schema_is_installed():
            await queries.uninstall()
        await queries.install()

    async def put(self, count: int, *, tasks: int) -> None:
        async def some(batches: int) -> None:
            queries = await self._queries()
            for _ in range(batches):
                await queries.enqueue([_ENTRY] * BATCH, [PAYLOAD] * BATCH, [0] * BATCH)

        await asyncio.gather(*(some(count // BATCH // tasks) for _ in range(tasks)))

    async def drain(self, *, connections: int) -> int:
        return sum(await asyncio.gather(*(self._work(self._batch) for _ in range(connections))))

    async def singles(self, *, workers: int) -> int:
        return sum(await asyncio.gather(*(self._work(1) for _ in range(workers))))

    async def latencies_ms(self, count: int, pause_s: float) -> list[float]:
        """Return latencies from the enqueue of one job on another connection to its handler, without other load."""
        manager = QueueManager(await self._queries())
        put_at_s: dict[str, float] = {}
        found: list[float] = []
        arrived = asyncio.Event()

        @manager.entrypoint(_ENTRY)
        async def handle(job: Any) -> None:
            found.append((time.perf_counter() - put_at_s[job.payload.decode()]) * 1000)
            arrived.set()

        running = asyncio.create_task(manager.run(dequeue_timeout=timedelta(seconds=30), batch_size=10))
        queries = await self._queries()
        await asyncio.sleep(1)
        for number in range(count):
            put_at_s[f"{number}"] = time.perf_counter()
            await queries.enqueue(_ENTRY, f"{number}".encode())
            await asyncio.wait_for(arrived.wait(), 60)
            arrived.clear()
            await asyncio.sleep(pause_s)
        manager.shutdown.set()
        await asyncio.wait_for(running, 60)
        return found

    async def close(self) -> None:
        queries = await self._queries()
        await queries.uninstall()
        await self._stack.aclose()

    async def _work(self, batch: int) -> int:
        queries = await self._queries()
        entrypoints: Any = {_ENTRY: EntrypointExecutionParameter(0)}
        manager: Any = uuid.uuid4()
        done = 0
        while True:
            jobs = await queries.dequeue(batch, entrypoints, manager, None, timedelta(seconds=30))
            if not jobs:
                return done
            await queries.log_jobs([(job, "successful", None) for job in jobs])
            done += len(jobs)

    async def _queries(self) -> Queries:
        connection = await asyncpg.connect(self._url)
        self._stack.push_async_callback(connection.close)
        return Queries(AsyncpgDriver(connection))


class PgQueuerManaged(PgQueuer):
    """Single jobs processed by pgqueuer's manager, which fetches jobs for its handlers and finishes them in batches."""

    async def singles(self, *, workers: int) -> int:
        manager = QueueManager(await self._queries())
        done = 0

        @manager.entrypoint(_ENTRY)
        async def handle(job: Any) -> None:
            nonlocal done
            done += 1

        await manager.run(
            mode=QueueExecutionMode.drain,
            batch_size=workers // 2,  # the maximum that pgqueuer allows with this many concurrent jobs
            max_concurrent_tasks=workers,
            dequeue_timeout=timedelta(seconds=1),
        )
        return done
