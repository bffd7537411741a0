"""The process dates, listeners and timers of one queue that this process listens to."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import Final

from tidebook.queue.port import NEVER_MS, UPCOMING_MAX, Due, QueueRef
from tidebook.runtime.backoff import Backoff

#: The first and the longest pause between polls, and between announcements of work that nobody claims. The first poll
#: after a sleep was published comes soon, because a concurrent put may not have seen the sleep yet.
FIRST_POLL_S: Final = 0.05
SLOW_POLL_S: Final = 5.0
_GROWTH: Final = 10.0


class DueDates:
    """What this process knows about the due dates of one queue, and what it published about its sleep."""

    def __init__(self, ref: QueueRef) -> None:
        self.ref = ref
        self.listeners: set[asyncio.Event] = set()
        #: Process dates in the future, ascending.
        self.dates: list[int] = []
        #: Whether the store may have later dates than these.
        self.has_later_dates = False
        #: Whether due entries wait for another entry of their key to be finished.
        self.waits_for_key = False
        #: The sleep that was published to putters: until when, and whether it waits for a held key; None: none.
        self.published_sleep: tuple[int, bool] | None = None
        #: How many claims returned entries since the last wake-up: then more entries may be due.
        self.claims = 0
        self.date_timer: asyncio.TimerHandle | None = None
        self.poll_timer: asyncio.TimerHandle | None = None
        self.announce_timer: asyncio.TimerHandle | None = None
        self._poll_backoff = Backoff(first_s=FIRST_POLL_S, max_s=SLOW_POLL_S, factor=_GROWTH)
        self._announce_backoff = Backoff(first_s=FIRST_POLL_S, max_s=SLOW_POLL_S, factor=_GROWTH)
        self._is_new = True

    def wake_listeners(self) -> None:
        """Wake all listeners."""
        self.claims = 0
        for listener in self.listeners:
            listener.set()

    def update(self, due: Due) -> None:
        """Replace what is known by what the store reported."""
        self.dates = list(due.upcoming)
        self.has_later_dates = len(due.upcoming) >= UPCOMING_MAX
        self.waits_for_key = due.held

    def add_date(self, date_ms: int) -> None:
        """Add the process date of an entry that was put."""
        index = bisect_left(self.dates, date_ms)
        if index == len(self.dates) or self.dates[index] != date_ms:
            self.dates.insert(index, date_ms)

    def pass_dates(self, now_ms: int) -> None:
        """Forget the dates that were reached."""
        while self.dates and self.dates[0] <= now_ms:
            del self.dates[0]

    def sleeps_until(self, lease_end: int) -> tuple[int, bool]:
        """Return the sleep to publish: a put that is due before this date must wake this process."""
        return min(self.dates[0] if self.dates else NEVER_MS, lease_end), self.waits_for_key

    def reset_backoff(self) -> None:
        """Reset the polling and announcing pauses: the queue has changed."""
        self._reset_announcing()
        self._poll_backoff.reset()

    def announce_delay_s(self) -> float:
        """Return how long to wait before announcing ready work; 0 if it is new, or if some of it was just claimed."""
        if self._is_new:
            self._is_new = False
            return 0.0
        delay_s = self._announce_backoff.next_s()
        return 0.0 if self.claims else delay_s

    def next_poll_s(self) -> float:
        """Return how long to sleep before the next poll."""
        self._reset_announcing()
        return self._poll_backoff.next_s()

    def _reset_announcing(self) -> None:
        self._is_new = True
        self._announce_backoff.reset()

    def cancel(self) -> None:
        """Cancel all timers."""
        for timer in (self.date_timer, self.poll_timer, self.announce_timer):
            if timer is not None:
                timer.cancel()
