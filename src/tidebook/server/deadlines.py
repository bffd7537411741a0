"""The time limits of requests.

A timer of the event loop for each request would cost more than the checks of the gate. So requests with the usual, long
limit are only registered, and a scan every second cancels those that are late; only short limits have a timer.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Final

#: The scan checks limits of at least this length, and cancels up to a second late.
SCANNED_S_MIN: Final = 10.0


class Deadline:
    """The limit of one request: a block that runs longer is cancelled, and raises `TimeoutError`."""

    __slots__ = ("_deadlines", "_task", "_timer", "at_s", "expired")

    def __init__(self, deadlines: Deadlines, limit_s: float) -> None:
        self._deadlines = deadlines
        self.at_s = limit_s
        self.expired = False
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        if self.at_s >= SCANNED_S_MIN:
            self.at_s += time.monotonic()
            self._deadlines.scanned.add(self)
        else:
            self._timer = asyncio.get_running_loop().call_later(self.at_s, self.expire)

    def expire(self) -> None:
        """Cancel the task that runs the block."""
        assert self._task is not None
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._timer is None:
            self._deadlines.scanned.discard(self)
        else:
            self._timer.cancel()
        if self.expired:
            assert task is not None
            # If the task was also cancelled for another reason, that cancellation is not hidden.
            if task.uncancel() <= 0 and kind is asyncio.CancelledError:
                raise TimeoutError from error


class Deadlines:
    """The long limits of all running requests."""

    def __init__(self) -> None:
        self.scanned: set[Deadline] = set()

    def timer(self, limit_s: float) -> Deadline:
        """Return a context manager that applies this limit to its block."""
        return Deadline(self, limit_s)

    def expire(self) -> None:
        """Cancel the requests that are too late; call this about every second."""
        now_s = time.monotonic()
        for each in [each for each in self.scanned if each.at_s <= now_s]:
            self.scanned.discard(each)
            each.expire()
