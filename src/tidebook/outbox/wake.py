"""An in-process hint that something was published: relays in this process look again soon."""

from __future__ import annotations

import threading
import weakref

_listeners: weakref.WeakSet[Wake] = weakref.WeakSet()
_listening = threading.Lock()


class Wake:
    """What a relay sleeps on. A nudge may come before the publisher's commit: the sleeper looks several times."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.nudged = False
        with _listening:
            _listeners.add(self)

    def set(self, *, nudged: bool = False) -> None:
        """Wake the sleeper."""
        self.nudged = self.nudged or nudged
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until woken; False when the time ran out first."""
        woken = self._event.wait(timeout_s)
        self._event.clear()
        return woken


def nudge() -> None:
    """Tell every relay of this process that rows may be about to be committed."""
    with _listening:
        sleepers = list(_listeners)
    for wake in sleepers:
        wake.set(nudged=True)
