"""Whose turn it is to poll a producer's client: its thread's or the event loop's, and never both.

The thread polls while there is little to do: it can wait. The loop polls under load, and for acknowledgements that come
so soon that looking for them a few times beats being woken by a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

from tidebook.log.kafka.nearness import Nearness

#: So many acknowledgements in one poll are load.
LOAD_RESULTS: Final = 8
#: While runs are on their way the loop looks for them so often, and no more than so many times in vain.
_LOOK_AGAIN_S: Final = 0.0005
_LOOKS_MAX: Final = 20
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
        self._looking: asyncio.TimerHandle | None = None
        self._in_vain = 0

    def pass_on(self, done: list[Any]) -> bool:
        """In the thread: whether the loop polls after these acknowledgements, and the thread stands still.

        They are records and what came of them, by turns; of a run that is None, and it counts for many.
        """
        return len(done) >= 2 * LOAD_RESULTS or (len(done) > 0 and (done[-1] is None or self.nearness.near))

    def stand_still(self) -> bool:
        """In the thread: touch nothing until the loop has polled in vain. False: the loop was closed."""
        while not self._go_on.acquire(timeout=_STANDSTILL_S):
            if self._loop.is_closed():
                return False
        return True

    def take(self) -> None:
        """It is the loop's turn: the thread stands still, or is about to."""
        self.loops = True

    def came(self) -> None:
        """A poll of the loop's brought something."""
        self._in_vain = 0

    def looks_again(self, look: Callable[[], None]) -> bool:
        """After a poll in vain, with runs on their way: whether the loop keeps its turn, to look again soon.

        The thread would want the interpreter for each single report, and take it from whoever makes the next records.
        """
        self._in_vain += 1
        if self._in_vain > _LOOKS_MAX:
            self._in_vain = 0
            return False
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_AGAIN_S, self._look, look)
        return True

    def _look(self, look: Callable[[], None]) -> None:
        self._looking = None
        if self.loops:
            look()

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
