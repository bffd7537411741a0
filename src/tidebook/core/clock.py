"""Time and identity are arguments: whoever needs them is given one of these."""

from __future__ import annotations

import itertools
import os
import struct
import time
import weakref
from typing import Protocol

_eight_bytes = struct.Struct(">Q").pack


class Clock(Protocol):
    """Wall time in milliseconds since 1970."""

    def now_ms(self) -> int: ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class Ids(Protocol):
    """A source of 16-byte ids that no one else draws."""

    def new(self) -> bytes: ...

    def several(self, count: int) -> list[bytes]: ...


class RandomIds:
    """Ten random bytes for each source and a counter behind them: unique, and far cheaper than a uuid each."""

    def __init__(self) -> None:
        self._draw_anew()
        # A fork must not draw its parent's ids.
        _sources.add(self)

    def _draw_anew(self) -> None:
        self._prefix = os.urandom(8)
        self._next = itertools.count(int.from_bytes(os.urandom(2)) << 48)

    def new(self) -> bytes:
        return self._prefix + _eight_bytes(next(self._next))

    def several(self, count: int) -> list[bytes]:
        return list(map(self._prefix.__add__, map(_eight_bytes, itertools.islice(self._next, count))))


_sources: weakref.WeakSet[RandomIds] = weakref.WeakSet()


def _after_fork() -> None:
    for source in list(_sources):
        source._draw_anew()


os.register_at_fork(after_in_child=_after_fork)
