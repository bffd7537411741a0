"""Statements on pooled connections: retried where they may be, their failures translated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors

from tidebook.core.errors import Unavailable
from tidebook.sql.port.queue import Synchronous
from tidebook.sql.postgres.connect import LOCK_MS_MAX, Connection, Pool
from tidebook.sql.postgres.failures import PASSING, from_psycopg

TRIES_MAX = 10


class Calls:
    """Runs statements, each a transaction of its own.

    A put may have to wait for an open transaction that has put the same key. At most `puts_max` of them are under way,
    fewer than the pool has connections: so one is left for leases, whoever waits.
    """

    def __init__(self, pool: Pool, *, puts_max: int) -> None:
        self._pool = pool
        self._puts = asyncio.Semaphore(puts_max)
        self._levels: WeakKeyDictionary[Connection, Synchronous] = WeakKeyDictionary()

    @asynccontextmanager
    async def connection(self, *, writes: bool = True, puts: bool = False) -> AsyncIterator[Connection]:
        """A connection for a transaction of one's own; failures are translated."""
        try:
            async with self._puts if puts else nullcontext(), self._pool.connection() as connection:
                yield connection
        except psycopg.Error as error:
            raise from_psycopg(error, writes=writes) from error

    async def put(self, sql: str, parameters: tuple[object, ...], *, level: Synchronous) -> list[tuple[Any, ...]]:
        """Execute a put, once there is a place for one more."""
        async with self._puts:
            return await self.rows(sql, parameters, level=level)

    async def rows(
        self, sql: str, parameters: tuple[object, ...], *, level: Synchronous | None = None, writes: bool = True
    ) -> list[tuple[Any, ...]]:
        """Execute a statement and fetch its rows."""
        began = time.monotonic()
        for attempt in range(TRIES_MAX):
            try:
                async with self._pool.connection() as connection:
                    if level is not None and self._levels.get(connection) != level:
                        await connection.execute(f"SET synchronous_commit = {level}")
                        self._levels[connection] = level
                    cursor = connection.cursor(binary=True)
                    await cursor.execute(sql, parameters)
                    return await cursor.fetchall()
            except PASSING as error:
                # An entry that was moved to another period's table under the statement is found there at the next try.
                # Who has waited for a lock as long as one may does not wait again.
                waited = isinstance(error, errors.LockNotAvailable) and time.monotonic() - began >= LOCK_MS_MAX / 1000
                if waited or attempt == TRIES_MAX - 1:
                    raise from_psycopg(error, writes=writes) from error
            except psycopg.Error as error:
                raise from_psycopg(error, writes=writes) from error
        raise Unavailable("unreachable: the last try returns or raises")
