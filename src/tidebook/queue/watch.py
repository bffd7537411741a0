"""What this process knows of one queue that it listens to."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import Final

from tidebook.sql.port.queue import NEVER_MS, UPCOMING_MAX, Due, QueueRef

#: After it has said that it sleeps, a listener looks again soon: a put may have missed what it said.
POLLS_S: Final = (0.05, 0.5)
SLOW_POLL_S: Final = 5.0
#: How soon it is told again of work that nobody takes.
AGAIN_S: Final = (0.05, 0.5)


class Watch:
    """The dates that are known, who listens, and what the putters were told."""

    def __init__(self, ref: QueueRef) -> None:
        self.ref = ref
        self.listeners: set[asyncio.Event] = set()
        #: Process dates to come, ascending.
        self.dates: list[int] = []
        #: Whether later dates than those may be there, unknown.
        self.more = False
        self.held = False
        #: What putters were told: until when it sleeps, and whether it waits for a held key.
        self.said: tuple[int, bool] | None = None
        #: How often entries were claimed here since the last wake-up: then there may be more for the same taker.
        self.claims = 0
        self.date_timer: asyncio.TimerHandle | None = None
        self.look_timer: asyncio.TimerHandle | None = None
        self.again_timer: asyncio.TimerHandle | None = None
        self._polls = 0
        self._tries = 0

    def fire(self) -> None:
        """Wake all who listen."""
        self.claims = 0
        for listener in self.listeners:
            listener.set()

    def learn(self, due: Due) -> None:
        """Take over what the store says."""
        self.dates = list(due.upcoming)
        self.more = len(due.upcoming) >= UPCOMING_MAX
        self.held = due.held

    def add_date(self, date_ms: int) -> None:
        """Something was put."""
        place = bisect_left(self.dates, date_ms)
        if place == len(self.dates) or self.dates[place] != date_ms:
            self.dates.insert(place, date_ms)

    def pass_dates(self, now_ms: int) -> None:
        """Forget dates that were reached."""
        while self.dates and self.dates[0] <= now_ms:
            del self.dates[0]

    def sleeps_until(self, lease_end: int) -> tuple[int, bool]:
        """What putters are to be told: a put that is due before this date wakes it."""
        return min(self.dates[0] if self.dates else NEVER_MS, lease_end), self.held

    def news(self) -> None:
        """Something has changed: what follows is not the same work again."""
        self._tries = self._polls = 0

    def again_s(self) -> float:
        """How long to wait before telling of work that is ready; 0 where it is news, or some of it was just taken."""
        tries, self._tries = self._tries, self._tries + 1
        if tries == 0 or self.claims:
            return 0.0
        return AGAIN_S[tries - 1] if tries <= len(AGAIN_S) else SLOW_POLL_S

    def next_poll_s(self) -> float:
        """How long to sleep before looking again."""
        self._tries = 0
        polls, self._polls = self._polls, self._polls + 1
        return POLLS_S[polls] if polls < len(POLLS_S) else SLOW_POLL_S

    def cancel(self) -> None:
        """No more timers."""
        for timer in (self.date_timer, self.look_timer, self.again_timer):
            if timer is not None:
                timer.cancel()
