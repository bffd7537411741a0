"""The request to stop a relay, and its deadline."""

from __future__ import annotations

import threading
import time


class RelayShutdown:
    """The stop request, shared by the threads of a relay."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._deadline = float("inf")

    def request(self, within_s: float) -> None:
        """Request the stop; later requests do not move the deadline."""
        if not self._requested.is_set():
            self._deadline = time.monotonic() + within_s
            self._requested.set()

    def requested(self) -> bool:
        """Return whether the relay should start nothing new."""
        return self._requested.is_set()

    def overdue(self) -> bool:
        """Return whether the deadline has passed and the batch in flight should be dropped."""
        return time.monotonic() > self._deadline

    def wait(self, timeout_s: float) -> bool:
        """Pause for `timeout_s`; return True at once when the stop is requested."""
        return self._requested.wait(timeout_s)
