"""An estimate of the store's clock, which alone decides what is due, leased or expired."""

from __future__ import annotations

import time

#: A reading that is older than this is replaced by any newer one.
_READING_S_MAX = 30.0


class StoreClock:
    """Maps the store's dates to this process's monotonic clock, by the fastest recent reading."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._error_s = float("inf")
        self._read_at = -_READING_S_MAX

    def observe(self, now_ms: int, asked_at: float) -> None:
        """Take a reading: the store answered `now_ms` to a request that was sent at `asked_at`."""
        answered_at = time.monotonic()
        error_s = answered_at - asked_at
        if error_s <= self._error_s or answered_at - self._read_at > _READING_S_MAX:
            self._offset_s = now_ms / 1000 - (asked_at + answered_at) / 2
            self._error_s = error_s
            self._read_at = answered_at

    def monotonic_at(self, date_ms: int) -> float:
        """Return the monotonic time at which the store's clock will show this date."""
        return date_ms / 1000 - self._offset_s

    def now_ms(self) -> int:
        """Return the estimated time of the store's clock."""
        return int((time.monotonic() + self._offset_s) * 1000)
