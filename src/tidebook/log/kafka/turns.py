"""Whose turn it is to poll a producer's client: its thread's or the event loop's, and never both.

The thread polls while there is little to do: it can wait. The loop polls under load, and for acknowledgements that come
so soon that looking for them a few times beats being woken by a thread.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from tidebook.log.kafka.nearness import Nearness

#: So many acknowledgements in one poll are load.
LOAD_RESULTS: Final = 8
#: How long the loop keeps its turn after a lone record, should another one come.
_REST_S: Final = 0.005
#: How late a thread that stands still notices that its loop was closed.
_STANDSTILL_S: Final = 1.0


class Turns:
    """Belongs to the event loop; the thread only asks and stands still."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.nearness = Nearness()
        #: The thread stands still.
        self.loops = False
        self._go_on = threading.Lock()
        self._go_on.acquire()
        self._resting: asyncio.TimerHandle | None = None

    def pass_on(self, results: int) -> bool:
        """In the thread: whether the loop polls after these acknowledgements, and the thread stands still."""
        return results >= LOAD_RESULTS or (results > 0 and self.nearness.near)

    def stand_still(self) -> bool:
        """In the thread: touch nothing until the loop has polled in vain. False: the loop was closed."""
        while not self._go_on.acquire(timeout=_STANDSTILL_S):
            if self._loop.is_closed():
                return False
        return True

    def take(self) -> None:
        """It is the loop's turn: the thread stands still, or is about to."""
        self.loops = True

    def keeps(self, in_flight: int) -> bool:
        """After a poll in vain: whether the loop keeps its turn, for what is near or for the next lone record."""
        if not self.nearness.near or in_flight >= LOAD_RESULTS:
            return False
        if in_flight:
            return self.nearness.looks(self._loop.time())
        if self._resting is None:
            self._resting = self._loop.call_later(_REST_S, self._rested)
        return True

    def _rested(self) -> None:
        self._resting = None
        rest_s = self.nearness.sent_at + _REST_S - self._loop.time()
        if not self.loops or rest_s <= 0:
            self.give_back()
        else:
            self._resting = self._loop.call_later(rest_s, self._rested)

    def give_back(self) -> None:
        """It is the thread's turn."""
        if self.loops:
            self.loops = False
            self._go_on.release()
