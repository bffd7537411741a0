"""Open a keyspace of Cassandra lazily: reads of a missing one return nothing, the first write creates it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any

from tidebook.store.sqlite.store import SqliteStore
from tidebook.wiring.lazy_folder import LazyStore, LazyWaits


class LazyKeyspace(LazyWaits):
    """Stands in for a `CassandraStore` whose keyspace did not exist when the book was opened.

    `find` returns the store if its tables exist by now: another process may create them at any time. `make` creates
    them. Both use the connection that `close` closes.
    """

    deletes_topics = False
    orders_topics = False

    def __init__(
        self,
        find: Callable[[], Awaitable[Any]],
        make: Callable[[], Awaitable[Any]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._find = find
        self._make = make
        self.close = close
        self._opening = asyncio.Lock()
        self._store: Any = None

    async def _existing(self) -> Any:
        """Return the store, or None if its tables do not exist."""
        return self._store or await self._open(self._find)

    async def open_or_create(self) -> Any:
        """Return the store, creating keyspace and tables if they are missing."""
        return self._store or await self._open(self._make)

    async def _open(self, open_store: Callable[[], Awaitable[Any]]) -> Any:
        async with self._opening:
            if self._store is None:
                self._store = await open_store()
        return self._store

    def __getattr__(self, name: str) -> Any:
        if self._store is not None:
            return getattr(self._store, name)
        if name in LazyStore._creating:

            async def create(*arguments: Any, **options: Any) -> Any:
                return await getattr(await self.open_or_create(), name)(*arguments, **options)

            return create
        if name not in LazyStore._results:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        missing = LazyStore._results[name]

        async def read(*arguments: Any, **options: Any) -> Any:
            store = await self._existing()
            return (
                missing(*arguments, **options) if store is None else await getattr(store, name)(*arguments, **options)
            )

        async def iterate(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
            store = await self._existing()
            if store is not None:
                async for item in getattr(store, name)(*arguments, **options):
                    yield item

        return iterate if isasyncgenfunction(getattr(SqliteStore, name)) else read
