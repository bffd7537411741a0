"""A worker: claims due entries, runs a handler for each, extends their leases, and stops without losing any."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import aclosing, suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypedDict

from tidebook.core.errors import InvalidInput, LeaseLost, TidebookError
from tidebook.queue.entry import duration_ms
from tidebook.queue.job import Job
from tidebook.queue.port import WorkerReport
from tidebook.queue.queue import Queue
from tidebook.queue.retry import Retry
from tidebook.runtime import tracing
from tidebook.runtime.blocking_facade import BlockingFacade
from tidebook.runtime.futures import cancel_and_wait, resolve_future

log = logging.getLogger("tidebook.queue")

CONCURRENCY_MAX: Final = 1_000
LEASE_S: Final = 60.0
#: How many times a lease is extended within its duration.
HEARTBEATS_PER_LEASE: Final = 3
#: The interval at which a worker reports itself; see `WORKER_GONE_MS`.
REPORT_S: Final = 10.0
#: The pause between attempts while the store is unavailable.
_RETRY_PAUSE_S: Final = 1.0
#: The interval at which `settle` checks whether the queue is empty.
_SETTLE_POLL_S: Final = 0.01

#: Processes a job, sync or async; its result is ignored, and an exception returns the entry to the queue.
Handler = Callable[[Job], Any]


class WorkerOptions(TypedDict, total=False):
    """The options of a `Worker`."""

    concurrency: int
    lease_s: float
    retry: Retry | None
    grace_s: float
    label: str | None


class HandlerThreads:
    """Runs handlers in at most `threads_max` daemon threads: a handler that hangs does not keep the process alive."""

    def __init__(self, name: str, *, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Return the call's result, or raise its error. A cancelled caller stops waiting; the call continues."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                outcome: Any = (call(),)  # in a tuple, since a handler may return an exception
            except BaseException as raised:  # a future cannot hold StopIteration, and the worker survives the others
                ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                outcome = raised if ordinary else RuntimeError(f"the handler raised {raised!r}")
            with suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(resolve_future, future, outcome)

        if not self._idle.acquire(blocking=False) and self._started < self._threads_max:
            self._started += 1
            threading.Thread(target=self._serve, name=f"{self._name} {self._started}", daemon=True).start()
        self._calls.put(run)
        (result,) = await future
        return result

    def close(self) -> None:
        """End each thread once no call is left."""
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.release()


class Worker:
    """Processes the entries of one queue until it is stopped.

    While it runs, it reports itself as `label`, by default the machine and the process: `queue.workers()` lists it.
    """

    def __init__(
        self,
        queue: Queue,
        handler: Handler,
        *,
        concurrency: int = 10,
        lease_s: float = LEASE_S,
        retry: Retry | None = None,
        grace_s: float = 30.0,
        label: str | None = None,
    ) -> None:
        if isinstance(queue, BlockingFacade):
            raise InvalidInput(
                f"a Worker cannot use a queue of a blocking book: use book.worker({queue.name!r}, handler), and start "
                "it with book.running"
            )
        if label is not None and (type(label) is not str or not label.isprintable() or not 1 <= len(label) <= 200):
            raise InvalidInput(f"a worker's label must be printable text of 1 to 200 characters, not {label!r:.60}")
        if type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(f"concurrency must be 1 to {CONCURRENCY_MAX:,}, not {concurrency!r}")
        if not callable(handler):
            raise InvalidInput(f"a handler must be a function of a job: {handler!r} cannot be called")
        duration_ms(lease_s, "lease", least_ms=10)
        duration_ms(grace_s, "grace")
        #: The name of the worker in a supervisor's status.
        self.name = f"worker {queue.name}"
        self._queue = queue
        self._handler = handler
        self._concurrency = concurrency
        self._lease_s = lease_s
        self._retry = retry or Retry()
        self._grace_s = grace_s
        self._label = label
        self._id = b""
        self._running: set[asyncio.Task[None]] = set()
        #: Jobs whose handler is running: their leases are extended.
        self._held: set[Job] = set()
        self._wakeup = asyncio.Event()
        self._stopping = False
        self._abort = asyncio.Event()
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        )
        self.done = self.failed = self.lost = 0

    def stop(self) -> None:
        """Claim nothing more; `run` returns when the running handlers have ended or the grace period is over.

        A second call ends the grace period immediately.
        """
        if self._stopping:
            self._abort.set()
        self._stopping = True
        self._wakeup.set()

    async def run(self, *, once: bool = False) -> None:
        """Process entries until stopped; with `once`, until nothing is due and nothing is running.

        After an error it may be called again.
        """
        self._threads = HandlerThreads(f"queue {self._queue.name}", threads_max=self._concurrency)
        self._id = os.urandom(16)
        heartbeats = asyncio.create_task(self._heartbeat_loop())
        reports = asyncio.create_task(self._report_loop())
        listening = None if once else asyncio.create_task(self._listen())
        try:
            while not self._stopping:
                claimed = await self._claim_free_slots(raise_errors=once)
                if once and not claimed and not self._running:
                    break
                if not claimed or len(self._running) >= self._concurrency:
                    await self._wakeup.wait()
                self._wakeup.clear()
            await self._drain()
        finally:
            await self._cancel_all(list(self._running))  # not empty only after a cancellation or a failed claim
            await cancel_and_wait(heartbeats, listening, reports)
            self._threads.close()
            with suppress(TidebookError):  # otherwise it soon counts as gone
                await self._queue.remove_worker(self._id)

    async def settle(self) -> None:
        """Return once no entry of the queue is due or being processed, by any worker."""
        while (status := await self._queue.status()).due or status.processing:
            if status.due:
                self._wakeup.set()  # advancing a manual clock wakes nothing
            await asyncio.sleep(_SETTLE_POLL_S)

    async def _claim_free_slots(self, *, raise_errors: bool) -> int:
        free = self._concurrency - len(self._running)
        if free <= 0:
            return 0
        try:
            jobs = await self._queue.claim(limit=free, lease=self._lease_s, together=False, worker=self._id)
        except TidebookError as error:
            if raise_errors:
                raise
            log.warning("queue %s: cannot claim, retrying: %s", self._queue.name, error)
            await asyncio.sleep(_RETRY_PAUSE_S)
            self._wakeup.set()
            return 0
        for job in jobs:
            self._held.add(job)
            task = asyncio.create_task(self._process(job))
            self._running.add(task)
            task.add_done_callback(self._on_task_done)
        return len(jobs)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wakeup.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("queue %s: the task of a job failed", self._queue.name, exc_info=task.exception())

    async def _process(self, job: Job) -> None:
        try:
            try:
                attributes = {"queue": self._queue.name, "attempt": job.timeouts + 1}
                with tracing.continuing("queue.process", job.traceparent, **attributes):
                    await self._call_handler(job)
            finally:
                self._held.discard(job)
        except asyncio.CancelledError:
            await self._return_entry(job, "the worker stopped", 0.0)
            raise
        except Exception as error:  # an error of the handler fails the entry, not the worker
            log.warning("queue %s: entry %s failed", self._queue.name, job.key or job.id, exc_info=True)
            await self._return_entry(job, f"{type(error).__name__}: {error}", self._retry.delay_s(job.timeouts))
            return
        try:
            await self._queue.done(job)
            self.done += 1
        except LeaseLost as error:
            self.lost += 1
            log.warning("queue %s: %s", self._queue.name, error)
        except TidebookError as error:  # it is due again when its lease expires
            log.warning("queue %s: %s is done, but could not be deleted: %s", self._queue.name, job.id, error)

    async def _call_handler(self, job: Job) -> None:
        if self._is_async:
            await self._handler(job)
            return
        # with the context variables of this task, such as the current span
        result = await self._threads.run(partial(copy_context().run, self._handler, job))
        if inspect.isawaitable(result):
            await result

    async def _return_entry(self, job: Job, reason: str, delay_s: float) -> None:
        self.failed += 1
        try:
            await self._queue.fail(job, delay=delay_s, reason=reason)
        except LeaseLost:
            self.lost += 1
        except TidebookError as error:  # it is due again when its lease expires
            log.warning("queue %s: entry %s failed, but could not be returned: %s", self._queue.name, job.id, error)

    async def _listen(self) -> None:
        while True:
            try:
                async with aclosing(self._queue.listen()) as due:
                    async for _ in due:
                        self._wakeup.set()
            except TidebookError as error:
                log.warning("queue %s: cannot listen, retrying: %s", self._queue.name, error)
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _heartbeat_loop(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / HEARTBEATS_PER_LEASE)
            jobs = list(self._held)
            if not jobs:
                continue
            try:
                await self._queue.heartbeat(jobs, lease=self._lease_s)
            except LeaseLost as error:
                if self._held.issuperset(jobs):  # none of them was finished in the meantime
                    log.warning("queue %s: %s", self._queue.name, error)
            except TidebookError as error:  # the next heartbeat may still be in time
                log.warning("queue %s: the heartbeat failed: %s", self._queue.name, error)

    async def _report_loop(self) -> None:
        label = self._label or f"{socket.gethostname()}:{os.getpid()}"
        while True:
            numbers = (self._concurrency, len(self._running), self.done, self.failed)
            try:
                await self._queue.report_worker(WorkerReport(self._id, label, *numbers))
            except TidebookError as error:  # the next report may still be in time
                log.debug("queue %s: the worker could not report itself: %s", self._queue.name, error)
            await asyncio.sleep(REPORT_S)

    async def _drain(self) -> None:
        if not self._running:
            return
        aborting = asyncio.create_task(self._abort.wait())
        draining = asyncio.create_task(asyncio.wait(list(self._running), timeout=self._grace_s))
        await asyncio.wait([aborting, draining], return_when=asyncio.FIRST_COMPLETED)
        aborting.cancel()
        draining.cancel()
        await self._cancel_all([task for task in self._running if not task.done()])
        await asyncio.gather(aborting, draining, return_exceptions=True)

    async def _cancel_all(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel running tasks; each returns its entry to the queue."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
