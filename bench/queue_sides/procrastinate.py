"""The peer procrastinate: jobs that one of its workers executes."""

from __future__ import annotations

from typing import Any

import procrastinate
import psycopg


class Procrastinate:
    """Jobs of one task, which one worker executes."""

    name = "procrastinate"

    def __init__(self, url: str) -> None:
        self._url = url
        self._schema = "bench_procrastinate"

    async def open(self) -> None:
        await self._run(f"DROP SCHEMA IF EXISTS {self._schema} CASCADE")
        await self._run(f"CREATE SCHEMA {self._schema}")
        connector = procrastinate.PsycopgConnector(
            conninfo=self._url, kwargs={"options": f"-c search_path={self._schema},public"}, max_size=6
        )
        self._app = procrastinate.App(connector=connector)
        self._done = 0

        @self._app.task(name="bench")
        async def bench(data: str) -> None:
            self._done += 1

        self._task = bench
        await self._app.open_async()
        await self._app.schema_manager.apply_schema_async()

    async def put(self, count: int, *, tasks: int) -> None:
        for _ in range(count // 100):
            jobs: list[Any] = [{"data": "x" * 100}] * 100
            await self._task.batch_defer_async(*jobs)

    async def drain(self, *, connections: int) -> int:
        self._done = 0
        await self._app.run_worker_async(
            wait=False, concurrency=connections * 5, install_signal_handlers=False, delete_jobs="always"
        )
        return self._done

    async def singles(self, *, workers: int) -> int:
        return await self.drain(connections=workers)

    async def close(self) -> None:
        await self._app.close_async()
        await self._run(f"DROP SCHEMA IF EXISTS {self._schema} CASCADE")

    async def _run(self, sql: str) -> None:
        async with await psycopg.AsyncConnection.connect(self._url, autocommit=True) as connection:
            await connection.execute(sql)
