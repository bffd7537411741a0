"""What runs in Spark's Python workers: a book's log and store, opened once a process, on a loop of its own."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

from tidebook.core.clock import SystemClock
from tidebook.core.metrics import Metrics
from tidebook.core.portal import Portal
from tidebook.log.port import Log
from tidebook.store.port import StoreWriter
from tidebook.wiring.adapters import open_log, open_store
from tidebook.wiring.settings import Settings, settings_from_json

T = TypeVar("T")

#: How a worker gets its store: an argument, so that a test can stand between a task and its writes.
OpenStore = Callable[[Settings], Awaitable[StoreWriter]]


async def open_settings_store(settings: Settings) -> StoreWriter:
    """The store that the settings name."""
    return await open_store(settings, metrics=Metrics())


class Worker:
    """The open adapters of one process, for one book. They are opened after the fork, when they are first wanted."""

    _open: ClassVar[dict[tuple[int, str, OpenStore], Worker]] = {}

    def __init__(self, settings: Settings, opening: OpenStore) -> None:
        self.settings = settings
        self._opening = opening
        self._portal = Portal()
        self._log: Log | None = None
        self._store: StoreWriter | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, settings: str, opening: OpenStore = open_settings_store) -> Worker:
        """The worker of this process for settings that were sent as JSON; a fork begins anew."""
        at = (os.getpid(), settings, opening)
        found = cls._open.get(at)
        if found is None:
            found = cls._open[at] = cls(settings_from_json(settings), opening)
        return found

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this worker's loop."""
        return self._portal.run(coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine on this worker's loop."""
        return self._portal.submit(coroutine)

    def iterate(self, pages: AsyncIterator[T]) -> Iterator[T]:
        """Pages for a thread, the next one read while one is used."""

        async def following() -> T | None:
            return await anext(pages, None)

        ahead = self._portal.submit(following())
        try:
            while (page := ahead.result()) is not None:
                ahead = self._portal.submit(following())
                yield page
        finally:
            ahead.cancel()

    async def store(self) -> StoreWriter:
        """The store, opened when it is first wanted."""
        async with self._lock:
            if self._store is None:
                self._store = await self._opening(self.settings)
                # Spark's daemon collects garbage after every task. What is loaded and open by now stays anyway.
                gc.freeze()
            return self._store

    async def log(self) -> Log:
        """The log, likewise."""
        async with self._lock:
            if self._log is None:
                self._log = await open_log(self.settings, clock=SystemClock(), metrics=Metrics())
            return self._log
