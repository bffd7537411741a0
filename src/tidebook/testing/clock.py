"""A clock that stands still until it is told otherwise."""

from __future__ import annotations


class ManualClock:
    """A `Clock` for tests.

    >>> clock = ManualClock(1000)
    >>> clock.advance(5)
    >>> clock.now_ms()
    1005
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self._now_ms += ms

    def set(self, now_ms: int) -> None:
        """Any time, an earlier one too: machines' clocks do that."""
        self._now_ms = now_ms
