"""What runs in Spark's Python workers: a book's log and store, opened once a process, on a loop of its own."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidebook.core.clock import SystemClock
from tidebook.core.metrics import Metrics
from tidebook.core.portal import Portal
from tidebook.log.port import Log
from tidebook.store.port import StoreWriter
from tidebook.wiring.adapters import open_log, open_store
from tidebook.wiring.settings import Settings, settings_from_json

T = TypeVar("T")


class Worker:
    """The open adapters of one process, for one book."""

    _open: dict[tuple[int, str], Worker] = {}

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._portal = Portal()
        self._log: Log | None = None
        self._store: StoreWriter | None = None

    @classmethod
    def of(cls, settings: str) -> Worker:
        """The worker of this process for settings that were sent as JSON; a fork begins anew."""
        at = (os.getpid(), settings)
        found = cls._open.get(at)
        if found is None:
            found = cls._open[at] = cls(settings_from_json(settings))
        return found

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this worker's loop."""
        return self._portal.run(coroutine)

    async def store(self) -> StoreWriter:
        """The store, opened when it is first wanted."""
        if self._store is None:
            self._store = await open_store(self._settings, metrics=Metrics())
        return self._store

    async def log(self) -> Log:
        """The log, likewise."""
        if self._log is None:
            self._log = await open_log(self._settings, clock=SystemClock(), metrics=Metrics())
        return self._log
