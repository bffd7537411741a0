"""A loop in a thread of its own: what the sync facade runs the one async body on."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

#: How far an iteration may run ahead of the thread that consumes it.
AHEAD_MAX = 1024


class Portal:
    """Runs coroutines and async iterators for threads that have no loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="tidebook-portal", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine; its result is waited for elsewhere."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Consume an async iterator, many items a hop between the threads."""
        ready: deque[T] = deque()
        news = threading.Condition()
        room = asyncio.Event()
        over: list[BaseException | None] = []

        async def pump() -> None:
            end: BaseException | None = None
            try:
                async for item in items:
                    with news:
                        ready.append(item)
                        news.notify()
                    if len(ready) >= AHEAD_MAX:
                        room.clear()
                        await room.wait()
            except asyncio.CancelledError:
                pass
            except BaseException as error:
                end = error
            finally:
                close = getattr(items, "aclose", None)
                if close is not None:
                    await close()
                with news:
                    over.append(end)
                    news.notify()

        task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while True:
                with news:
                    while not ready and not over:
                        news.wait()
                    taken = list(ready)
                    ready.clear()
                    finished = bool(over)
                self._loop.call_soon_threadsafe(room.set)
                yield from taken
                if finished:
                    if over[0] is not None:
                        raise over[0]
                    return
        finally:
            task.cancel()

    def close(self) -> None:
        """Stop the loop and its thread."""
        if self._loop.is_closed():
            return
        self.run(_finish_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _finish_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
