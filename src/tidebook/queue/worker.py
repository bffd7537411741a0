"""A worker: takes what is due, runs a handler over it, keeps its leases alive, and stops without dropping anything."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from tidebook.core.errors import InvalidInput, LeaseLost, TidebookError
from tidebook.queue.ending import end
from tidebook.queue.entry import duration_ms
from tidebook.queue.job import Job
from tidebook.queue.queue import Queue
from tidebook.queue.retry import Retry
from tidebook.queue.threads import Threads

log = logging.getLogger("tidebook.queue")

CONCURRENCY_MAX: Final = 1_000
LEASE_S: Final = 60.0
#: A lease is extended this often within its time.
BEATS: Final = 3
#: While the store does not answer, this long between tries.
_PAUSE_S: Final = 1.0

#: Takes a job; what it returns is dropped, what it raises sends the entry back to wait. May be async.
Handler = Callable[[Job], Any]


class Worker:
    """Works on one queue until it is told to stop."""

    def __init__(
        self,
        queue: Queue,
        handler: Handler,
        *,
        concurrency: int = 10,
        lease_s: float = LEASE_S,
        retry: Retry | None = None,
        grace_s: float = 30.0,
    ) -> None:
        if type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(f"concurrency is 1 to {CONCURRENCY_MAX:,}, not {concurrency!r}")
        if not callable(handler):
            raise InvalidInput(f"a handler is called with a job: {handler!r} cannot be called")
        duration_ms(lease_s, "lease", least_ms=10)
        duration_ms(grace_s, "grace")
        self._queue = queue
        self._handler = handler
        self._concurrency = concurrency
        self._lease_s = lease_s
        self._retry = retry or Retry()
        self._grace_s = grace_s
        self._running: set[asyncio.Task[None]] = set()
        #: Jobs whose handler runs: their leases are kept alive.
        self._held: set[Job] = set()
        self._changed = asyncio.Event()
        self._stopping = False
        self._hurry = asyncio.Event()
        self._threads = Threads(f"queue {queue.name}", threads_max=concurrency)
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        )
        self.done = self.failed = self.lost = 0

    def stop(self) -> None:
        """Take nothing more; `run` returns when what is running has ended, or its time of grace is over.

        Said again, the time of grace is over.
        """
        if self._stopping:
            self._hurry.set()
        self._stopping = True
        self._changed.set()

    async def run(self, *, once: bool = False) -> None:
        """Work until stopped; with `once`, until nothing is due and nothing runs."""
        beating = asyncio.create_task(self._beat())
        listening = None if once else asyncio.create_task(self._listen())
        try:
            while not self._stopping:
                taken = await self._take(raises=once)
                if once and not taken and not self._running:
                    break
                if not taken or len(self._running) >= self._concurrency:
                    await self._changed.wait()
                self._changed.clear()
            await self._finish_running()
        finally:
            await self._give_up(list(self._running))  # some are left only where this was cancelled, or could not claim
            await end(beating, listening)
            self._threads.close()

    async def _take(self, *, raises: bool) -> int:
        free = self._concurrency - len(self._running)
        if free <= 0:
            return 0
        try:
            jobs = await self._queue.claim(limit=free, lease=self._lease_s, together=False)
        except TidebookError as error:
            if raises:
                raise
            log.warning("queue %s: cannot claim, trying again: %s", self._queue.name, error)
            await asyncio.sleep(_PAUSE_S)
            self._changed.set()
            return 0
        for job in jobs:
            self._held.add(job)
            task = asyncio.create_task(self._work(job))
            self._running.add(task)
            task.add_done_callback(self._ended)
        return len(jobs)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._changed.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("queue %s: a job ended badly", self._queue.name, exc_info=task.exception())

    async def _work(self, job: Job) -> None:
        try:
            try:
                await self._handle(job)
            finally:
                self._held.discard(job)
        except asyncio.CancelledError:
            await self._give_back(job, "the worker stopped", 0.0)
            raise
        except Exception as error:  # whatever a handler raises is the entry's failure, not the worker's
            log.warning("queue %s: %s failed", self._queue.name, job.key or job.id, exc_info=True)
            await self._give_back(job, f"{type(error).__name__}: {error}", self._retry.delay_s(job.timeouts))
            return
        try:
            await self._queue.done(job)
            self.done += 1
        except LeaseLost as error:
            self.lost += 1
            log.warning("queue %s: %s", self._queue.name, error)
        except TidebookError as error:  # it comes again when its lease has run out
            log.warning("queue %s: %s is done, but that could not be noted: %s", self._queue.name, job.id, error)

    async def _handle(self, job: Job) -> None:
        if self._is_async:
            await self._handler(job)
            return
        result = await self._threads.run(partial(self._handler, job))
        if inspect.isawaitable(result):
            await _awaited(result)

    async def _give_back(self, job: Job, reason: str, delay_s: float) -> None:
        self.failed += 1
        try:
            await self._queue.fail(job, delay=delay_s, reason=reason)
        except LeaseLost:
            self.lost += 1
        except TidebookError as error:  # it comes again when its lease has run out
            log.warning("queue %s: %s failed, but that could not be noted: %s", self._queue.name, job.id, error)

    async def _listen(self) -> None:
        while True:
            try:
                async with aclosing(self._queue.listen()) as due:
                    async for _ in due:
                        self._changed.set()
            except TidebookError as error:
                log.warning("queue %s: cannot listen, trying again: %s", self._queue.name, error)
                await asyncio.sleep(_PAUSE_S)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / BEATS)
            jobs = list(self._held)
            if not jobs:
                continue
            try:
                await self._queue.heartbeat(jobs, lease=self._lease_s)
            except LeaseLost as error:
                if self._held.issuperset(jobs):  # none of them was finished meanwhile
                    log.warning("queue %s: %s", self._queue.name, error)
            except TidebookError as error:  # the next beat may still be in time
                log.warning("queue %s: no heartbeat: %s", self._queue.name, error)

    async def _finish_running(self) -> None:
        if not self._running:
            return
        hurrying = asyncio.create_task(self._hurry.wait())
        ending = asyncio.create_task(asyncio.wait(list(self._running), timeout=self._grace_s))
        await asyncio.wait([hurrying, ending], return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        ending.cancel()
        await self._give_up([task for task in self._running if not task.done()])
        await asyncio.gather(hurrying, ending, return_exceptions=True)

    async def _give_up(self, late: list[asyncio.Task[None]]) -> None:
        """End what still runs; each entry is given back."""
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def _awaited(result: Awaitable[Any]) -> None:
    await result
