"""Run statements on pooled connections, retry transient failures, and translate errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors

from tidebook.postgres.connect import LOCK_MS_MAX, Connection, Pool
from tidebook.postgres.errors import TRANSIENT, from_psycopg
from tidebook.queue.port import Synchronous

ATTEMPTS_MAX = 10
Parameters = tuple[object, ...] | dict[str, object]


class StatementRunner:
    """Runs statements, each in its own transaction.

    A put may wait for an open transaction that has put the same key. At most `puts_max` puts run at once, fewer than
    the pool has connections, so that waiting puts never block leases.
    """

    def __init__(self, pool: Pool, *, puts_max: int) -> None:
        self._pool = pool
        self._put_slots = asyncio.Semaphore(puts_max)
        self._commit_levels: WeakKeyDictionary[Connection, Synchronous] = WeakKeyDictionary()

    @asynccontextmanager
    async def connection(self, *, puts: bool = False) -> AsyncIterator[Connection]:
        """Yield a connection for a transaction of the caller; translate its errors."""
        try:
            async with self._put_slots if puts else nullcontext(), self._pool.connection() as connection:
                yield connection
        except psycopg.Error as error:
            raise from_psycopg(error, writes=True) from error

    async def put(self, sql: str, parameters: tuple[object, ...], *, level: Synchronous) -> list[tuple[Any, ...]]:
        """Execute a put, once fewer than `puts_max` are running."""
        async with self._put_slots:
            return await self.rows(sql, parameters, level=level)

    async def rows(
        self, sql: str, parameters: Parameters, *, level: Synchronous | None = None, writes: bool = True
    ) -> list[tuple[Any, ...]]:
        """Execute a statement and return its rows."""
        started_at, attempts = time.monotonic(), 0
        while True:
            attempts += 1
            try:
                async with self._pool.connection() as connection:
                    if level is not None and self._commit_levels.get(connection) != level:
                        await connection.execute(f"SET synchronous_commit = {level}")
                        self._commit_levels[connection] = level
                    cursor = connection.cursor(binary=True)
                    await cursor.execute(sql, parameters)
                    return await cursor.fetchall()
            except psycopg.Error as error:
                # A retry finds an entry that was moved to another partition while the statement ran.
                # A statement that has waited for a lock for the full time is not retried.
                waited_s = time.monotonic() - started_at
                lock_timed_out = isinstance(error, errors.LockNotAvailable) and waited_s >= LOCK_MS_MAX / 1000
                if not isinstance(error, TRANSIENT) or lock_timed_out or attempts == ATTEMPTS_MAX:
                    raise from_psycopg(error, writes=writes) from error
