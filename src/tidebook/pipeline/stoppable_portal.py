"""Run requests to the log and the store from a job's thread, so that none of them delays a stop of the job."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidebook.core.errors import Unavailable
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.futures import cancel_quietly

T = TypeVar("T")

#: How often a request in progress checks whether the job was stopped.
CHECK_EVERY_S = 0.05


class StoppablePortal:
    """Runs requests on a portal's loop. After a stop, the request in progress and each later one get `within_s`.

    A request that does not end in this time is cancelled and raises `Unavailable`; so do all later ones, unattempted.
    """

    def __init__(self, portal: BlockingPortal, stop: threading.Event, *, within_s: float) -> None:
        self.unbounded = portal
        self._stop = stop
        self._within_s = within_s
        self._unanswered = False

    def run(self, request: Coroutine[Any, Any, T]) -> T:
        """Run a request to completion and return its result."""
        return self.unbounded.run(self._bounded(request))

    async def _bounded(self, request: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(request)
        deadline_s = math.inf
        try:
            while not self._unanswered:
                done, _ = await asyncio.wait((task,), timeout=CHECK_EVERY_S)
                if done:
                    return task.result()
                if self._stop.is_set():
                    deadline_s = min(deadline_s, time.monotonic() + self._within_s)
                self._unanswered = time.monotonic() >= deadline_s
            raise Unavailable(f"the log or the store did not respond within {self._within_s} s after a stop")
        finally:
            cancel_quietly(task)
