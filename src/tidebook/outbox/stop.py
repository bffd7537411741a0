"""Asking a relay to end: the batch in hand is finished, or let go of when that takes too long."""

from __future__ import annotations

import threading
import time


class Stop:
    """Shared by the threads of a relay."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._by = float("inf")

    def ask(self, within_s: float) -> None:
        """Ask once; what is not done within the time is dropped."""
        if not self._asked.is_set():
            self._by = time.monotonic() + within_s
            self._asked.set()

    def asked(self) -> bool:
        """Whether the relay should take nothing new."""
        return self._asked.is_set()

    def overdue(self) -> bool:
        """Whether it should drop what it has."""
        return time.monotonic() > self._by

    def wait(self, timeout_s: float) -> bool:
        """Pause, but not past the call to stop."""
        return self._asked.wait(timeout_s)
