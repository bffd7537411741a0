"""A loop in a thread of its own: what the sync facade runs the one async body on."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from tidebook.core.errors import InvalidInput, OutcomeUnknown, Unavailable

T = TypeVar("T")

#: How far an iteration may run ahead of the thread that consumes it.
AHEAD_MAX = 1024


class Portal:
    """Runs coroutines and async iterators for threads that have no loop."""

    def __init__(self) -> None:
        self._lead_to(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._serve, name="tidebook-portal", daemon=True)
        self._thread.start()

    def _lead_to(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: The thread that the loop runs in, where it is the portal's own.
        self._serving: int | None = None
        self._lock = threading.Lock()
        self._closed = False

    def _serve(self) -> None:
        self._serving = threading.get_ident()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine; its result is waited for elsewhere."""
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise Unavailable("the book is closed")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result."""
        if threading.get_ident() == self._serving:  # it would wait for itself, for ever
            coroutine.close()
            raise InvalidInput("a blocking call from within the book's own loop: make it from a thread of your own")
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError as error:
            if not self._closed:
                raise
            raise OutcomeUnknown("the book was closed before this was answered: it may have happened") from error
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T], *, ahead_max: int = AHEAD_MAX) -> Iterator[T]:
        """Consume an async iterator, many items a hop between the threads."""
        if threading.get_ident() == self._serving:
            raise InvalidInput("a blocking iteration from within the book's own loop: do it in a thread of your own")
        ready: deque[T] = deque()
        news = threading.Condition()
        room = asyncio.Event()
        over: list[BaseException | None] = []

        async def pump() -> None:
            try:
                async for item in items:
                    with news:
                        ready.append(item)
                        news.notify()
                    if len(ready) >= ahead_max:
                        room.clear()
                        await room.wait()
            finally:
                close = getattr(items, "aclose", None)
                if close is not None:
                    await close()

        def ended(task: Future[None]) -> None:
            # A consumer that is cut off must not take what it has for the whole.
            cut_off = Unavailable("the book was closed during the iteration: what came is not all of it")
            with news:
                over.append(cut_off if task.cancelled() else task.exception())
                news.notify()

        task = self.submit(pump())
        task.add_done_callback(ended)
        try:
            while True:
                with news:
                    while not ready and not over:
                        news.wait()
                    taken = list(ready)
                    ready.clear()
                    finished = bool(over)
                if not finished:
                    self._call(room.set)
                yield from taken
                if finished:
                    if over[0] is not None:
                        raise over[0]
                    return
        finally:
            task.cancel()

    def _call(self, call: Callable[[], object]) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Stop the loop and its thread; what still runs is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            finished = asyncio.run_coroutine_threadsafe(_finish_tasks(), self._loop)
        finished.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _finish_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
