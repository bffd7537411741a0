"""Tidebook's queue, through its public API."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import psycopg

import tidebook
from bench.queue_sides.side import BATCH, PAYLOAD
from tidebook.queue.entry import Entry
from tidebook.queue.queue import Queue
from tidebook.wiring.book import Book

#: The tasks per connection of the other queues. Tasks share calls on at most four connections, two for claims and two
#: for finishes. Each task claims a hundred entries, as the others do; with half as many tasks, fewer share a call.
TASKS_EACH = 8


class Ours:
    """A book whose queues are on PostgreSQL, or in a folder."""

    name = "tidebook"

    def __init__(self, url: str | None, *, schema: str = "bench_tidebook") -> None:
        self._url = url
        self.schema = schema
        self._folder = tempfile.TemporaryDirectory(prefix="tidebook-bench-")
        self.book: Book
        self.queue: Queue

    def settings(self) -> Path:
        """The book's settings file, or its folder."""
        folder = Path(self._folder.name)
        if self._url is None:
            return folder
        file = folder / "tidebook.toml"
        file.write_text(f'folder = "data"\n[sql]\nurl = "{self._url}"\n[queue]\nschema = "{self.schema}"\n')
        return file

    async def open(self) -> None:
        await self._drop()
        self.book = tidebook.open(self.settings())
        await self.book.__aenter__()
        self.queue = await self.book.queue("bench").open()

    async def put(self, count: int, *, tasks: int) -> None:
        async def some(batches: int) -> None:
            for _ in range(batches):
                await self.queue.put_many([Entry(data=PAYLOAD) for _ in range(BATCH)])

        await asyncio.gather(*(some(count // BATCH // tasks) for _ in range(tasks)))

    async def drain(self, *, connections: int) -> int:
        async def some() -> int:
            done = 0
            while jobs := await self.queue.claim(BATCH):
                await self.queue.done(jobs)
                done += len(jobs)
            return done

        return sum(await asyncio.gather(*(some() for _ in range(TASKS_EACH * connections))))

    async def singles(self, *, workers: int) -> int:
        async def some() -> int:
            done = 0
            while jobs := await self.queue.claim(1):
                await self.queue.done(jobs[0])
                done += 1
            return done

        return sum(await asyncio.gather(*(some() for _ in range(workers))))

    async def close(self) -> None:
        await self.book.__aexit__(None, None, None)
        await self._drop()

    async def _drop(self) -> None:
        if self._url is not None:
            async with await psycopg.AsyncConnection.connect(self._url, autocommit=True) as connection:
                await connection.execute(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")
