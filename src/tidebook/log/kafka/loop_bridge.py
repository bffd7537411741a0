"""Calls from a client's thread into the event loop, at half the cost of `call_soon_threadsafe`.

`call_soon_threadsafe` wakes the loop through a socket pair (one send, two receives) and runs the call in the next
iteration. An eventfd needs one write and one read, and the calls run in the iteration that was woken.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable


class LoopBridge:
    """Runs calls from any thread in one event loop, in the order in which they were made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._eventfd = -1
        if sys.platform == "linux":  # elsewhere there is no eventfd
            self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.add_reader(self._eventfd, self._on_wakeup)

    def call_in_loop(self, call: Callable[..., object], *args: object) -> bool:
        """Run this call in the loop; thread-safe. Return False if the loop is closed."""
        if self._loop.is_closed():
            return False
        self._calls.append((call, args))
        try:
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)
            else:
                self._loop.call_soon_threadsafe(self._run_calls)
        except (RuntimeError, OSError):
            return False
        return True

    def close(self) -> None:
        """Run the remaining calls and close the eventfd; call it in the loop, when no thread can call any more."""
        self._run_calls()
        if self._eventfd >= 0:
            self._loop.remove_reader(self._eventfd)
            os.close(self._eventfd)
            self._eventfd = -1

    def _on_wakeup(self) -> None:
        os.eventfd_read(self._eventfd)
        self._run_calls()

    def _run_calls(self) -> None:
        while self._calls:
            call, args = self._calls.popleft()
            try:
                call(*args)
            except Exception as error:  # like the loop itself: one failing call must not prevent the next
                self._loop.call_exception_handler({"message": "a call from a thread failed", "exception": error})
