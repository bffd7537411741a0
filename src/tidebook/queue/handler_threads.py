"""Daemon threads for blocking handlers: a handler that hangs does not keep the process alive."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any


class HandlerThreads:
    """Runs calls in at most `threads_max` threads, which are started on demand."""

    def __init__(self, name: str, *, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Return the call's result, or raise its error. A cancelled caller stops waiting; the call continues."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def resolve(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = call()
            except StopIteration as stopped:  # a future cannot hold StopIteration
                error = RuntimeError(f"the handler raised {stopped!r}")
            except BaseException as raised:
                error = raised if isinstance(raised, Exception) else RuntimeError(f"the handler raised {raised!r}")
            try:
                loop.call_soon_threadsafe(resolve, result, error)
            except RuntimeError:  # the loop was closed in the meantime
                pass

        if not self._idle.acquire(blocking=False) and self._started < self._threads_max:
            self._started += 1
            threading.Thread(target=self._serve, name=f"{self._name} {self._started}", daemon=True).start()
        self._calls.put(run)
        return await future

    def close(self) -> None:
        """Let each thread end once no call is left."""
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.release()
