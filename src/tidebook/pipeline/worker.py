"""A book's log and store inside a Python worker, shared by its Spark tasks."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

from tidebook.core.errors import TidebookError
from tidebook.log.port import Log
from tidebook.pipeline.errors import attach_report
from tidebook.replication.partition import LogAndStore
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.clock import SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.wiring.adapters import open_log, open_store
from tidebook.wiring.settings import Settings, settings_from_json

T = TypeVar("T")

#: Opens a worker's store; a parameter so that a test can intercept the writes of a task.
OpenStore = Callable[[Settings], Awaitable[StoreWriter]]


async def open_settings_store(settings: Settings) -> StoreWriter:
    """Open the store that the settings name."""
    return await open_store(settings, metrics=Metrics())


class SparkWorker(LogAndStore):
    """The log and store of one book in one process; they are opened on first use, which is after the fork."""

    _open: ClassVar[dict[tuple[int, str, OpenStore], SparkWorker]] = {}

    def __init__(self, settings: Settings, opening: OpenStore) -> None:
        self.settings = settings
        self._opening = opening
        self._portal = BlockingPortal()
        self._opened_log: Log | None = None
        self._opened_store: StoreWriter | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, settings: str, opening: OpenStore = open_settings_store) -> SparkWorker:
        """Return this process's worker for settings that were sent as JSON; a forked process gets a new one."""
        key = (os.getpid(), settings, opening)
        found = cls._open.get(key)
        if found is None:
            found = cls._open[key] = cls(settings_from_json(settings), opening)
        return found

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this worker's loop and return its result."""
        return self._portal.run(_reporting(coroutine))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on this worker's loop and return its future."""
        return self._portal.submit(_reporting(coroutine))

    def iterate(self, pages: AsyncIterator[T]) -> Iterator[T]:
        """Yield pages to a thread, prefetching the next page while the caller uses one."""

        async def following() -> T | None:
            return await anext(pages, None)

        prefetched = self.submit(following())
        try:
            while (page := prefetched.result()) is not None:
                prefetched = self.submit(following())
                yield page
        finally:
            prefetched.cancel()

    async def store(self) -> StoreWriter:
        """Return the store; open it on first use."""
        async with self._lock:
            if self._opened_store is None:
                self._opened_store = await self._opening(self.settings)
                # Spark's daemon runs the garbage collector after every task, and objects loaded so far are never freed.
                gc.freeze()
            return self._opened_store

    async def log(self) -> Log:
        """Return the log; open it on first use."""
        async with self._lock:
            if self._opened_log is None:
                self._opened_log = await open_log(self.settings, clock=SystemClock(), metrics=Metrics())
            return self._opened_log


async def _reporting(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine; attach a report to its error, from which the driver rebuilds it."""
    try:
        return await coroutine
    except TidebookError as error:
        attach_report(error)
        raise
