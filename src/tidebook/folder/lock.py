"""A lock between processes that nobody can overtake: whoever waits for it stands in the turnstile before it."""

from __future__ import annotations

import fcntl
import os
import random
import time
from pathlib import Path

from tidebook.core.errors import Unavailable
from tidebook.folder.failures import from_os

_PAUSE_S_LEAST = 0.000_05
_PAUSE_S_MOST = 0.002


class FairLock:
    """Two locked files: `next` is held while waiting for `main`, so that who has just let go of it queues behind.

    Not for use by several threads at once. A process that dies lets go of both.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._main = _open(path.with_name(path.name + ".lock"))
        self._next = _open(path.with_name(path.name + ".next"))
        self.held = False

    def acquire(self, timeout_s: float) -> None:
        """Wait for one's turn; Unavailable when it does not come."""
        deadline = time.monotonic() + timeout_s
        if not _take(self._next, deadline):
            raise Unavailable(f"{self._path}: other writers kept it for {timeout_s:g} s: nothing was changed")
        try:
            if not _take(self._main, deadline):
                raise Unavailable(f"{self._path}: another writer held it for {timeout_s:g} s: is it stopped?")
            self.held = True
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def release(self) -> None:
        """Let the next one in."""
        self.held = False
        fcntl.flock(self._main, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the files, and so of the lock."""
        os.close(self._main)
        os.close(self._next)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise from_os(error, path) from error


def _take(file: int, deadline: float) -> bool:
    # Tried again and again instead of waited for: flock knows no deadline, and its holder may be stopped.
    pause_s = _PAUSE_S_LEAST
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, _PAUSE_S_MOST)
        except OSError as error:
            raise Unavailable(f"the lock of a book's file cannot be had: {error}") from error
        else:
            return True
