"""Open a log or store lazily: reads of a missing folder or keyspace return nothing, and the first write creates it.

A program that only reads must create nothing; otherwise a misspelled folder would become a new, empty book. Another
process may create the files or tables at any time, so every call checks for them until they exist.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from inspect import isasyncgenfunction, iscoroutinefunction
from pathlib import Path
from typing import Any, ClassVar

from tidebook.core.errors import NotFound, Unavailable
from tidebook.core.position import Position
from tidebook.log.sqlite.log import SqliteLog
from tidebook.sqlite.errors import from_os
from tidebook.store.sqlite.store import SqliteStore

#: The interval at which a wait checks whether another process has created the files, which cannot wake it earlier.
POLL_INTERVAL_S = 0.2


class _LazyAdapter:
    """Stands in for an adapter, and opens it when its file exists or when a write needs it."""

    _adapter_type: ClassVar[type]
    #: The methods that create a missing file.
    _creating: ClassVar[frozenset[str]]
    #: The results of the other methods while the file is missing: functions that take the method's arguments.
    _results: ClassVar[Mapping[str, Callable[..., Any]]]

    def __init__(self, path: Path, make: Callable[[], Any]) -> None:
        self.path = path
        self._make = make
        self._adapter: Any = None
        self._closed = False

    def open_existing(self) -> Any:
        """Return the adapter, opening it if its file exists; return None if there is no file."""
        if self._adapter is None and (self._closed or self._file_exists()):
            return self.open_or_create()
        return self._adapter

    def open_or_create(self) -> Any:
        """Return the adapter, opening it and creating the folder and the file if they are missing."""
        if self._closed:
            raise Unavailable(f"{self.path} is closed")
        if self._adapter is None:
            self._adapter = self._make()
            # The adapter's own methods become attributes, so that an append has no extra call.
            for name in (*self._creating, *self._results):
                setattr(self, name, getattr(self._adapter, name))
        return self._adapter

    def __getattr__(self, name: str) -> Any:
        if name in self._creating:
            open_adapter = self.open_or_create
        elif name in self._results:
            open_adapter = self.open_existing
        else:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        def call(*arguments: Any, **options: Any) -> Any:
            adapter = open_adapter()
            method = self._results[name] if adapter is None else getattr(adapter, name)
            return method(*arguments, **options)

        async def call_async(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            return result if self._adapter is None else await result

        return call_async if iscoroutinefunction(getattr(self._adapter_type, name)) else call

    def _file_exists(self) -> bool:
        # A SQLite write-ahead file without its database is damage; opening the adapter reports it.
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            try:
                os.stat(path)
                return True
            except FileNotFoundError:
                pass
            except OSError as error:
                raise from_os(error, path) from error
        return False

    async def close(self) -> None:
        """Close the adapter if it is open; every later call raises `Unavailable`."""
        self._closed = True
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            await adapter.close()


def _returning(result: Any, *names: str) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names, lambda *_, **__: result)


def _no_topic(topic: str, *_: Any, **__: Any) -> Any:
    raise NotFound(f"there is no topic {topic}")


async def _no_items(*_: Any, **__: Any) -> AsyncIterator[Any]:
    return
    yield


class LazyLog(_LazyAdapter):
    """Stands in for a `SqliteLog` of a folder that may not exist yet."""

    indexed_by_key = True
    end_is_linearizable = True
    _adapter_type = SqliteLog
    _creating = frozenset({"create_topic", "send", "send_many", "append"})
    _results: ClassVar = {
        "topic": lambda topic: None,
        "topics": list,
        "damage": list,
        **dict.fromkeys(("delete_topic", "read", "start", "end", "truncate", "wait"), _no_topic),
    }


class LazyWaits(ABC):
    """The waits of a store that may not exist yet: they poll for it, since a missing store cannot wake them."""

    @abstractmethod
    async def _existing(self) -> Any:
        """Return the store, or None if it does not exist."""

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:
        """Wait for the store too: return False if it is still missing after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (store := await self._existing()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(left_s, POLL_INTERVAL_S))
        left_s = max(0.0, deadline - time.monotonic())
        return bool(await store.wait(topic, partition, beyond=beyond, timeout_s=left_s))

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        """Wait for any write; if the store is missing, return -1 after one poll interval at most."""
        store = await self._existing()
        if store is not None:
            return int(await store.wait_any(timeout_s=timeout_s, since=since))
        await asyncio.sleep(min(timeout_s, POLL_INTERVAL_S))
        return -1


class LazyStore(LazyWaits, _LazyAdapter):
    """Stands in for a `SqliteStore` of a folder that may not exist yet."""

    deletes_topics = True
    orders_topics = True
    _adapter_type = SqliteStore
    _creating = frozenset({"apply", "repair", "save_snapshot", "set_topic_config", "set_setting"})
    _results: ClassVar = {
        **_returning(None, "pointer", "head", "topic_config", "setting"),
        **_returning(None, "delete_snapshots", "delete_topic", "remove_graves", "unpark"),
        **_returning((), "events", "snapshots", "topics", "tag_rows", "topic_rows", "splits", "inspect_tag"),
        "setting_names": lambda prefix: (),
        "replicated_ms": int,
        "heads": lambda topic, ids: {},
        "pointers": lambda topic: {},
        "damage": list,
        **dict.fromkeys(("ids", "tags", "heads_in", "events_in", "inspect", "expired", "graves", "parked"), _no_items),
    }

    async def _existing(self) -> Any:
        return self.open_existing()


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
            if store is None:
                return missing(*arguments, **options)
            return await getattr(store, name)(*arguments, **options)

        async def iterate(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
            store = await self._existing()
            if store is not None:
                async for item in getattr(store, name)(*arguments, **options):
                    yield item

        return iterate if isasyncgenfunction(getattr(SqliteStore, name)) else read
