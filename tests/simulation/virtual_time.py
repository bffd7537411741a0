"""An event loop whose clock jumps to the next timer: hours of a simulated cluster take milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs ready tasks in an order that only depends on the program; advances the time when none is ready.

    It does no I/O. If nothing is ready and no timer is set, the program is deadlocked, and the loop raises.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_NoFiles(self._advance))

    def time(self) -> float:
        return self._now_s

    def _advance(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            raise RuntimeError("every task waits, and no timer is set")
        self._now_s += max(timeout_s, 0.0)

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Run a program to its end, then cancel the tasks that it has left."""
        try:
            return self.run_until_complete(program)
        finally:
            left = asyncio.all_tasks(self)
            for task in left:
                task.cancel()
            if left:
                self.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def run_in_virtual_time(program: Callable[[], Awaitable[T]]) -> T:
    """Run a program on a separate loop, and close the loop."""

    async def main() -> T:
        return await program()

    loop = VirtualTimeLoop()
    try:
        return loop.run(main())
    finally:
        loop.close()


class _NoFiles(selectors.SelectSelector):
    def __init__(self, wait: Callable[[float | None], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[Any]:
        self._wait(timeout)
        return []
