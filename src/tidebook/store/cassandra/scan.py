"""Read pages of a journal's events over its segments, and all heads of a topic segment by segment."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final

from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    EventRow,
    SliceWrites,
    listed_between,
    segments_between,
)
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.errors import PERHAPS_TOO_LARGE
from tidebook.store.cassandra.rows import EVENTS_PER_ROW_MAX, decode_rows
from tidebook.store.cassandra.session import CassandraSession, first_column, read_rows, run_bounded

PAGE_BYTES: Final = 4_000_000
#: The assumed size of an event until a page was read; it makes the first page 16 rows long.
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
        """Return whether a page of this key was recorded."""
        return key in self._row_bytes

    def rows(self, key: Hashable, wanted: int) -> int:
        """Return how many rows to read: at most `wanted`, and no more than fit into `PAGE_BYTES`."""
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


#: How many segments are read concurrently if one cannot fill the page, or was empty.
SEGMENTS_AT_ONCE_MAX: Final = 32
SCANS_AT_ONCE: Final = 16
#: How many rows of a segment list are read per request.
LISTED_PAGE: Final = 1000


class EventPages:
    """Reads pages of events over gaps, segment borders and jumps of the numbers.

    A journal's last run of consecutive segments follows from its head; earlier segments are found in its segment list.
    The list is read after the head and is complete, because it was written before the head.
    """

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        #: A journal's own events predict the size best; until some were read, those of its topic are used.
        self._journals = PageSizes()
        self._topics = PageSizes()

    async def read(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> list[EventRow]:
        """Return the next events of a journal: at least one if there is any, at most `limit`, bounded in bytes."""
        sized_by: Hashable = key.topic
        sizes = self._topics
        if self._journals.knows(key):
            sized_by, sizes = key, self._journals
        # A range has at most one row per number, so packing only matters if the range exceeds the limit.
        rows_max = (
            min(limit, sizes.rows_of_events(sized_by, limit)) if to - after > limit else sizes.rows(sized_by, limit)
        )
        try:
            return await self._page(key, head, after, to, limit, rows_max)
        except Unavailable as error:
            if not isinstance(error.__cause__, PERHAPS_TOO_LARGE):
                raise
            self._journals.timed_out(key)
            if rows_max <= PAGE_ROWS_MIN:
                raise
        # Earlier events do not predict the size of these, so the page may have been too large: read a few rows.
        return await self._page(key, head, after, to, limit, PAGE_ROWS_MIN)

    async def cells(self, key: Key, segment: int, *, after: int, to: int, limit: int) -> list[bytes]:
        """Return encoded rows of a segment: the first that extend beyond `after`, up to the one that holds `to`."""
        values = [key.id, key.topic, segment, after, to + EVENTS_PER_ROW_MAX - 1, limit]
        return await read_rows(self._session, cql.EVENTS, values, limit=limit, decode=first_column)

    async def listed(self, key: Key, head: Head, *, above: int, to: int, page: int) -> AsyncIterator[Sequence[int]]:
        """Yield pages of the listed segments that may hold numbers above `above` and up to `to`, in order."""
        wanted = listed_between(head, above, to)
        while wanted:
            values = [key.id, key.topic, *head.incarnation, wanted.start, wanted.stop, page]
            found = await read_rows(self._session, cql.SEGMENTS, values, limit=page, decode=first_column)
            segments = array("q", found)
            if segments:
                yield segments
            if len(segments) < page:
                return
            wanted = range(segments[-1] + 1, wanted.stop)

    async def _page(self, key: Key, head: Head, after: int, to: int, limit: int, rows_max: int) -> list[EventRow]:
        if rows := await self._listed_page(key, head, after, to, limit, rows_max):
            return rows
        segments = chain.from_iterable(segments_between(head, after, to))
        at_once = min(max(rows_max // head.segment_size, 1), SEGMENTS_AT_ONCE_MAX)
        while some := list(islice(segments, at_once)):
            if len(some) == 1:
                cells = await self.cells(key, some[0], after=after, to=to, limit=rows_max)
            else:
                reads = (self.cells(key, each, after=after, to=to, limit=rows_max) for each in some)
                cells = list(chain.from_iterable(await asyncio.gather(*reads)))[:rows_max]
            if rows := self._decoded(key, cells, after, to)[:limit]:
                return rows
            # Nothing found: more empty segments may follow, so the step grows.
            at_once = min(at_once * 2, SEGMENTS_AT_ONCE_MAX)
        return []

    async def _listed_page(
        self, key: Key, head: Head, after: int, to: int, limit: int, rows_max: int
    ) -> list[EventRow]:
        """Return the next events of the listed segments. Each may hold a single event, so many segments make a page."""
        cells: list[bytes] = []
        async for segments in self.listed(key, head, above=after, to=to, page=min(rows_max, LISTED_PAGE)):
            while segments:
                left = rows_max - len(cells)
                at_once = min(left, SEGMENTS_AT_ONCE_MAX)
                some, segments = segments[:at_once], segments[at_once:]
                reads = (self.cells(key, each, after=after, to=to, limit=left) for each in some)
                cells += chain.from_iterable(await asyncio.gather(*reads))
                if len(cells) >= rows_max:
                    return self._decoded(key, cells[:rows_max], after, to)[:limit]
        return self._decoded(key, cells, after, to)[:limit]

    def _decoded(self, key: Key, cells: Sequence[bytes], after: int, to: int) -> list[EventRow]:
        """Decode the events within the range, and record their sizes."""
        if not cells:
            return []
        rows = decode_rows(cells)
        size_bytes = sum(map(len, cells))
        self._topics.record(key.topic, len(cells), size_bytes, events=len(rows))
        self._journals.record(key, len(cells), size_bytes, events=len(rows))
        return _between(rows, after, to)


def _between(rows: list[EventRow], after: int, to: int) -> list[EventRow]:
    """Drop the events outside the range that the packed rows at its ends hold."""
    if rows and (rows[0].seq_nr <= after or rows[-1].seq_nr > to):
        return [row for row in rows if after < row.seq_nr <= to]
    return rows


async def listed_segments(
    pages: EventPages, writes: SliceWrites, *, at_once: int
) -> Mapping[tuple[Key, Position], Sequence[int]]:
    """Return the listed segments that a slice clears, by incarnation.

    The segments that the slice itself lists must be written before this call.
    """
    found: dict[tuple[Key, Position], Sequence[int]] = {}

    async def read_list(write: ClearEvents | ClearJournal) -> None:
        head = write.head
        above, to = (write.above, head.delete_to) if isinstance(write, ClearEvents) else (0, head.seq_nr)
        segments = array("q")
        async for page in pages.listed(write.key, head, above=above, to=to, page=LISTED_PAGE):
            segments.extend(page)
        found[write.key, head.incarnation] = segments

    clears = [
        write
        for of_key in writes.keys
        for write in of_key
        if isinstance(write, ClearEvents | ClearJournal) and write.head.run_start
    ]
    await run_bounded(read_list, clears, at_once=at_once)
    return found


async def scan_segments(
    session: CassandraSession, query: str, topic: str, segments: int, *, page_size: int
) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Yield pages of all rows of a topic in `metajournal`, reading a few segments ahead."""
    prefetched: dict[int, asyncio.Task[Any]] = {}
    try:
        for segment in range(segments):
            for upcoming in range(segment, min(segment + SCANS_AT_ONCE, segments)):
                if upcoming not in prefetched:
                    first = session.read(query, [topic, upcoming], page_size=page_size)
                    prefetched[upcoming] = asyncio.ensure_future(first)
            page = await prefetched.pop(segment)
            yield [row.as_tuple() for row in page]
            while page.has_more_pages():
                page = await session.read(query, [topic, segment], page_size=page_size, page_state=page.page_state())
                yield [row.as_tuple() for row in page]
    finally:
        for task in prefetched.values():
            task.cancel()
        await asyncio.gather(*prefetched.values(), return_exceptions=True)
