"""In-process hints that something was published, so that relays of this process poll soon."""

from __future__ import annotations

import os
import threading
import weakref

_listeners: weakref.WeakSet[RelayWakeup] = weakref.WeakSet()
_listening = threading.Lock()


class RelayWakeup:
    """What a relay sleeps on. A nudge may precede the publisher's commit, so the relay polls several times."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.nudged = False
        with _listening:
            _listeners.add(self)

    def set(self, *, nudged: bool = False) -> None:
        """Wake the relay."""
        self.nudged = self.nudged or nudged
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until woken; return False on timeout."""
        woken = self._event.wait(timeout_s)
        self._event.clear()
        return woken


def nudge() -> None:
    """Wake every relay of this process: rows may be committed soon."""
    with _listening:
        sleepers = list(_listeners)
    for wake in sleepers:
        wake.set(nudged=True)


def _after_fork() -> None:
    # A thread that does not exist in the child may hold the lock, and the relays run in the parent.
    global _listening
    _listening = threading.Lock()
    _listeners.clear()


os.register_at_fork(after_in_child=_after_fork)
