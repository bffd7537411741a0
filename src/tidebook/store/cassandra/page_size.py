"""How many rows to ask for at once, when nobody knows beforehand how large they are."""

from __future__ import annotations

from typing import Final

PAGE_BYTES: Final = 4_000_000
#: What an event of an unknown topic is taken for: the first page is 16 rows, and tells better.
EVENT_BYTES_UNKNOWN: Final = 250_000
PAGE_ROWS_MIN: Final = 4
TOPICS_MAX: Final = 10_000
#: How much of a larger size seen earlier is remembered with each page of smaller events.
DECAY: Final = 0.8


class PageSizes:
    """Rows a page, by topic: bounded in bytes by what recent pages held. Sizes rise at once and fall slowly."""

    def __init__(self) -> None:
        self._bytes: dict[str, float] = {}

    def rows(self, topic: str, wanted: int) -> int:
        """At most `wanted`, and no more than a page should weigh."""
        size = self._bytes.get(topic, EVENT_BYTES_UNKNOWN)
        return min(wanted, max(PAGE_ROWS_MIN, int(PAGE_BYTES / size)))

    def saw(self, topic: str, rows: int, size_bytes: int) -> None:
        """Learn from a page that came."""
        if rows:
            self._keep(topic, max(size_bytes / rows, 1.0, self._bytes.get(topic, 0.0) * DECAY))

    def timed_out(self, topic: str) -> None:
        """A page did not come in time: perhaps it was too large, so the next one asked for is a quarter of it."""
        size = self._bytes.get(topic, EVENT_BYTES_UNKNOWN)
        self._keep(topic, min(size * 4, PAGE_BYTES / PAGE_ROWS_MIN))

    def _keep(self, topic: str, size: float) -> None:
        if topic not in self._bytes and len(self._bytes) >= TOPICS_MAX:
            self._bytes.clear()
        self._bytes[topic] = size
