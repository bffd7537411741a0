"""How many rows to ask for at once, when nobody knows beforehand how large they are."""

from __future__ import annotations

from typing import Final

PAGE_BYTES: Final = 4_000_000
#: What an event of an unknown topic is taken for: the first page is 100 rows, and tells better.
EVENT_BYTES_UNKNOWN: Final = 40_000
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
        if not rows:
            return
        if topic not in self._bytes and len(self._bytes) >= TOPICS_MAX:
            self._bytes.clear()
        mean = size_bytes / rows
        self._bytes[topic] = max(mean, 1.0, self._bytes.get(topic, 0.0) * DECAY)
