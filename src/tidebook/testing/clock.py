"""A clock for tests, which only the test advances."""

from __future__ import annotations

from datetime import timedelta


class ManualClock:
    """A `Clock` whose time a test sets.

    >>> clock = ManualClock(1000)
    >>> clock.advance(5)
    >>> clock.now_ms()
    1005
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, by: int | timedelta) -> None:
        """Advance the wall clock and the monotonic clock by milliseconds or a timedelta."""
        ms = by // timedelta(milliseconds=1) if isinstance(by, timedelta) else by
        self._now_ms += ms
        self._monotonic_ms += ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def set(self, now_ms: int) -> None:
        """Set the wall clock to any time, which may be earlier; the monotonic clock does not change."""
        self._now_ms = now_ms
