"""Sources of time and of unique ids, which are always passed as arguments so that tests can replace them."""

from __future__ import annotations

import itertools
import os
import struct
import time
import weakref
from typing import Protocol

_eight_bytes = struct.Struct(">Q").pack


class Clock(Protocol):
    """A source of wall-clock time, which may jump when the clock is set, and of monotonic time, which never does."""

    def now_ms(self) -> int:
        """Return the wall-clock time in milliseconds since 1970."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds since an arbitrary moment, which never decrease; leases are measured by this clock."""
        ...


#: On Linux only this clock includes the time a machine was suspended, during which leases expire too.
_MONOTONIC_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The clock of the machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.clock_gettime_ns(_MONOTONIC_CLOCK) // 1_000_000


class Ids(Protocol):
    """A source of globally unique 16-byte ids."""

    def new(self) -> bytes:
        """Return one id."""
        ...

    def several(self, count: int) -> list[bytes]:
        """Return `count` ids."""
        ...


class RandomIds:
    """Ids that start with ten random bytes per source and end with a counter: unique, and far cheaper than UUIDs."""

    def __init__(self) -> None:
        self._reseed()
        # A forked child must not issue the ids of its parent.
        _sources.add(self)

    def _reseed(self) -> None:
        self._prefix = os.urandom(8)
        self._next = itertools.count(int.from_bytes(os.urandom(2)) << 48)

    def new(self) -> bytes:
        return self._prefix + _eight_bytes(next(self._next))

    def several(self, count: int) -> list[bytes]:
        return list(map(self._prefix.__add__, map(_eight_bytes, itertools.islice(self._next, count))))


_sources: weakref.WeakSet[RandomIds] = weakref.WeakSet()


def _after_fork() -> None:
    for source in list(_sources):
        source._reseed()


os.register_at_fork(after_in_child=_after_fork)
