"""A fair lock between processes: a process that releases it cannot take it again before one that is waiting."""

from __future__ import annotations

import fcntl
import os
import random
import time
from pathlib import Path

from tidebook.core.errors import Unavailable
from tidebook.runtime.backoff import Backoff
from tidebook.sqlite.errors import from_os

_PAUSE_S_MIN = 0.000_05
_PAUSE_S_MAX = 0.002


class FairLock:
    """Two file locks: a process holds `next` while it waits for `main`.

    A process that has just released `main` must take `next` first, so it queues after the process that waits. The
    kernel releases both when a process dies. Not thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._main = open_lock_file(path.with_name(path.name + ".lock"))
        self._next = open_lock_file(path.with_name(path.name + ".next"))
        self.held = False

    def acquire(self, timeout_s: float) -> None:
        """Wait for the lock; raise Unavailable if it cannot be taken within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        if not take_lock(self._next, timeout_s=timeout_s):
            raise Unavailable(f"{self._path}: other writers held its lock for {timeout_s:g} s: nothing was changed")
        try:
            if not take_lock(self._main, timeout_s=deadline - time.monotonic()):
                raise Unavailable(
                    f"{self._path}: another writer held its lock for {timeout_s:g} s: is that process suspended?"
                )
            self.held = True
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def release(self) -> None:
        """Release the lock."""
        self.held = False
        fcntl.flock(self._main, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files, which releases the lock."""
        os.close(self._main)
        os.close(self._next)


def open_lock_file(path: Path) -> int:
    """Open or create a lock file and return its descriptor."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise from_os(error, path) from error


def take_lock(file: int, *, timeout_s: float) -> bool:
    """Lock an open file; return False if another process held the lock for `timeout_s`."""
    # Poll instead of blocking: flock has no timeout, and the process that holds the lock may be suspended.
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(first_s=_PAUSE_S_MIN, max_s=_PAUSE_S_MAX)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(backoff.next_s() * random.uniform(0.5, 1.0))
        except OSError as error:
            raise Unavailable(f"the lock of a book's file cannot be taken: {error}") from error
        else:
            return True
