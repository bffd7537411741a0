"""The store's time as this process can know it: it alone decides, whatever the machine's own clock says."""

from __future__ import annotations

import time

#: A reading that is older than this gives way to any newer one.
_READING_S_MAX = 30.0


class StoreClock:
    """Maps dates of the store to moments of the process's monotonic clock, by the quickest answer of late."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._doubt_s = float("inf")
        self._read_at = -_READING_S_MAX

    def note(self, now_ms: int, asked_at: float) -> None:
        """The store said `now_ms` in answer to what was asked at this moment, and it is now."""
        heard_at = time.monotonic()
        doubt_s = heard_at - asked_at
        if doubt_s <= self._doubt_s or heard_at - self._read_at > _READING_S_MAX:
            self._offset_s = now_ms / 1000 - (asked_at + heard_at) / 2
            self._doubt_s = doubt_s
            self._read_at = heard_at

    def moment(self, date_ms: int) -> float:
        """When, on the monotonic clock, the store will say that it is this date."""
        return date_ms / 1000 - self._offset_s

    def now_ms(self) -> int:
        """What the store's clock says about now."""
        return int((time.monotonic() + self._offset_s) * 1000)
