"""Choose how many rows to request per page when the size of the rows is not known in advance."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

PAGE_BYTES: Final = 4_000_000
#: The assumed size of an event before the first page, which so has 16 rows.
EVENT_BYTES_UNKNOWN: Final = 250_000
PAGE_ROWS_MIN: Final = 4
KNOWN_MAX: Final = 10_000
#: The factor by which an earlier, larger size decays with each page of smaller events.
DECAY: Final = 0.8


class PageSizes:
    """Rows per page by topic, journal or tag, bounded in bytes by the sizes of recent pages.

    Estimates rise at once and fall slowly.
    """

    def __init__(self) -> None:
        self._row_bytes: dict[Hashable, float] = {}
        #: Events per row, where rows hold more than one.
        self._events_per_row: dict[Hashable, int] = {}

    def knows(self, key: Hashable) -> bool:
        """Return whether a page of it was recorded."""
        return key in self._row_bytes

    def rows(self, key: Hashable, wanted: int) -> int:
        """Return at most `wanted` rows, and no more than fit into `PAGE_BYTES`."""
        size = self._row_bytes.get(key, EVENT_BYTES_UNKNOWN)
        return min(wanted, max(PAGE_ROWS_MIN, int(PAGE_BYTES / size)))

    def rows_of_events(self, key: Hashable, wanted: int) -> int:
        """Return about as many rows as hold `wanted` events, by the last page recorded."""
        return self.rows(key, wanted // self._events_per_row.get(key, 1) + 1)

    def record(self, key: Hashable, rows: int, size_bytes: int, *, events: int = 0) -> None:
        """Record a page; `events` is given where rows may hold several."""
        if rows:
            self._set(key, max(size_bytes / rows, 1.0, self._row_bytes.get(key, 0.0) * DECAY))
            if events // rows > 1:
                self._events_per_row[key] = events // rows
            elif self._events_per_row:
                self._events_per_row.pop(key, None)

    def timed_out(self, key: Hashable) -> None:
        """Record a page that timed out, perhaps because it was too large: the next one is a quarter of it."""
        size = self._row_bytes.get(key, EVENT_BYTES_UNKNOWN)
        self._set(key, min(size * 4, PAGE_BYTES / PAGE_ROWS_MIN))

    def _set(self, key: Hashable, size: float) -> None:
        if key not in self._row_bytes and len(self._row_bytes) >= KNOWN_MAX:
            self._row_bytes.clear()
            self._events_per_row.clear()
        self._row_bytes[key] = size
