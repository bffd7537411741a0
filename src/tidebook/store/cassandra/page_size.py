"""How many rows to ask for at once, when nobody knows beforehand how large they are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

PAGE_BYTES: Final = 4_000_000
#: What an event of an unknown topic is taken for: the first page is 16 rows, and tells better.
EVENT_BYTES_UNKNOWN: Final = 250_000
PAGE_ROWS_MIN: Final = 4
KNOWN_MAX: Final = 10_000
#: How much of a larger size seen earlier is remembered with each page of smaller events.
DECAY: Final = 0.8


class PageSizes:
    """Rows a page, by topic, journal or tag: bounded in bytes by what recent pages held.

    Sizes rise at once and fall slowly.
    """

    def __init__(self) -> None:
        self._bytes: dict[Hashable, float] = {}
        #: How many events share a row, where that is more than one.
        self._shared: dict[Hashable, int] = {}

    def knows(self, of: Hashable) -> bool:
        """Whether a page of it was seen."""
        return of in self._bytes

    def rows(self, of: Hashable, wanted: int) -> int:
        """At most `wanted`, and no more than a page should weigh."""
        size = self._bytes.get(of, EVENT_BYTES_UNKNOWN)
        return min(wanted, max(PAGE_ROWS_MIN, int(PAGE_BYTES / size)))

    def rows_of_events(self, of: Hashable, wanted: int) -> int:
        """About as many as hold `wanted` events, by the last page of it."""
        return self.rows(of, wanted // self._shared.get(of, 1) + 1)

    def saw(self, of: Hashable, rows: int, size_bytes: int, *, events: int = 0) -> None:
        """Learn from a page that came; `events` where rows may hold several."""
        if rows:
            self._keep(of, max(size_bytes / rows, 1.0, self._bytes.get(of, 0.0) * DECAY))
            if events // rows > 1:
                self._shared[of] = events // rows
            elif self._shared:
                self._shared.pop(of, None)

    def timed_out(self, of: Hashable) -> None:
        """A page did not come in time: perhaps it was too large, so the next one asked for is a quarter of it."""
        size = self._bytes.get(of, EVENT_BYTES_UNKNOWN)
        self._keep(of, min(size * 4, PAGE_BYTES / PAGE_ROWS_MIN))

    def _keep(self, of: Hashable, size: float) -> None:
        if of not in self._bytes and len(self._bytes) >= KNOWN_MAX:
            self._bytes.clear()
            self._shared.clear()
        self._bytes[of] = size
