"""From a client's thread into the event loop, at half the price of `call_soon_threadsafe`.

That one wakes the loop through a socket pair, which costs a send and two receives, and a turn of the loop for the call;
an event counter costs one write and one read, and the calls run in the turn that noticed it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable


class Crossing:
    """Calls that threads hand to one event loop; they run there in the order in which they were handed over."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._counter = -1
        if sys.platform == "linux":
            counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            try:
                self._loop.add_reader(counter, self._woken)
            except NotImplementedError:  # a loop without readers: the common way serves
                os.close(counter)
            else:
                self._counter = counter

    def tell(self, call: Callable[..., object], *args: object) -> bool:
        """From any thread: run this in the loop. False if the loop was closed, and nobody is left to tell."""
        if self._loop.is_closed():
            return False
        self._calls.append((call, args))
        try:
            if self._counter >= 0:
                os.eventfd_write(self._counter, 1)
            else:
                self._loop.call_soon_threadsafe(self._run)
        except (RuntimeError, OSError):
            return False
        return True

    def close(self) -> None:
        """In the loop, once no thread can call any more: run what is left, and let go."""
        self._run()
        if self._counter >= 0:
            self._loop.remove_reader(self._counter)
            os.close(self._counter)
            self._counter = -1

    def _woken(self) -> None:
        try:
            os.eventfd_read(self._counter)
        except BlockingIOError:
            pass  # an earlier turn has read it
        self._run()

    def _run(self) -> None:
        calls = self._calls
        while calls:
            call, args = calls.popleft()
            try:
                call(*args)
            except Exception as error:  # as the loop itself would: one call's mistake is not the next one's
                self._loop.call_exception_handler({"message": "a call from a thread failed", "exception": error})
