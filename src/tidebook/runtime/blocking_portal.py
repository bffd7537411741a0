"""An event loop in a separate thread, on which the blocking facades run the async implementation."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.runtime.process import generation, refuse_fork

T = TypeVar("T")

#: How many items an iteration may buffer before its consumer takes them.
PREFETCH_MAX = 1024


class BlockingPortal:
    """Runs coroutines and async iterators for threads without an event loop."""

    def __init__(self) -> None:
        self._attach(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._run_loop, name="tidebook-portal", daemon=True)
        self._thread.start()

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach the portal to a loop. The conformance suite calls only this, with a running loop."""
        self._loop = loop
        #: The id of the portal's own thread, once it runs the loop.
        self._loop_thread_id: int | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._generation = generation()

    def _run_loop(self) -> None:
        self._loop_thread_id = threading.get_ident()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return its future; raise Unavailable if the portal is closed."""
        try:
            self._refuse_fork()
            with self._lock:
                if self._closed:
                    raise Unavailable("the book is closed")
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except TidebookError:
            coroutine.close()
            raise

    def _refuse_fork(self) -> None:
        """Raise InvalidInput in a forked child, where the portal's thread does not exist."""
        refuse_fork(self._generation, "the book")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to completion and return its result."""
        if threading.get_ident() == self._loop_thread_id:  # the loop would wait for itself forever
            coroutine.close()
            raise InvalidInput(
                "a blocking call inside the book's event loop would wait forever: make it from another thread"
            )
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError as error:
            if not self._closed:
                raise
            raise OutcomeUnknown("the book was closed before the call returned: it may have taken effect") from error
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T], *, ahead_max: int = PREFETCH_MAX) -> Iterator[T]:
        """Iterate an async iterator from a thread without a loop; items are passed between the threads in batches."""
        if threading.get_ident() == self._loop_thread_id:
            raise InvalidInput(
                "a blocking iteration inside the book's event loop would wait forever: run it in another thread"
            )
        ready: deque[T] = deque()
        changed = threading.Condition()
        has_room = asyncio.Event()
        #: Empty while the iteration runs, then its error or None.
        outcome: list[BaseException | None] = []

        async def pump() -> None:
            try:
                async for item in items:
                    with changed:
                        ready.append(item)
                        changed.notify()
                    if len(ready) >= ahead_max:
                        has_room.clear()
                        await has_room.wait()
            finally:
                close = getattr(items, "aclose", None)
                if close is not None:
                    await close()

        def on_done(task: Future[None]) -> None:
            # If the portal is closed meanwhile, the consumer must not mistake a part of the items for all of them.
            interrupted = Unavailable("the book was closed during the iteration: more items may follow those received")
            with changed:
                outcome.append(interrupted if task.cancelled() else task.exception())
                changed.notify()

        task = self.submit(pump())
        task.add_done_callback(on_done)
        try:
            while True:
                self._refuse_fork()
                with changed:
                    while not ready and not outcome:
                        changed.wait()
                    batch = list(ready)
                    ready.clear()
                    finished = bool(outcome)
                if not finished:
                    self._call_soon(has_room.set)
                yield from batch
                if finished:
                    if outcome[0] is not None:
                        raise outcome[0]
                    return
        finally:
            if self._generation == generation():
                task.cancel()

    def _call_soon(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancel all tasks and stop the loop and its thread. In a forked child there is nothing to stop."""
        if self._generation != generation():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            cancelled = asyncio.run_coroutine_threadsafe(_cancel_tasks(), self._loop)
        cancelled.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
