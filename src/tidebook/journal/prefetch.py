"""Prefetch a journal's rows from the store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import NamedTuple

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication_plan import EventRow
from tidebook.runtime.futures import cancel_quietly
from tidebook.store.port import StoreReader

#: The first page is requested in this many parts concurrently, so that one is used while the other is in flight. Later
#: pages are requested whole, because every request has a cost on both sides.
FIRST_PAGE_PARTS = 2
RANGES_IN_FLIGHT_MAX = 3


class PrefetchedRange(NamedTuple):
    """A request in flight for the first `limit` rows with after < seq_nr ≤ to."""

    after: int
    to: int
    limit: int
    rows: Awaitable[Sequence[EventRow]]


class RowPrefetcher:
    """Returns the rows of one read in order, range by range.

    While every sequence number has a row, the next ranges are requested in advance. After a gap, or if the rows are too
    large for one response, the next range is requested only when the previous response has shown where it starts.
    """

    def __init__(self, store: StoreReader, key: Key, *, limit: int) -> None:
        self._store = store
        self._key = key
        self._limit = limit
        self._head: Head | None = None
        self._to = 0
        #: Rows after `_begin` up to `_end` were requested.
        self._begin = 0
        self._end = 0
        self._requested: deque[PrefetchedRange] = deque()
        #: Whether the last response had all rows that were requested, one for each sequence number.
        self.dense = True

    def begin(self, head: Head, *, after: int, to: int) -> bool:
        """Use this head from now on; return False if the rows requested with an earlier head had to be discarded.

        They are usable if the earlier head is of the same incarnation and not newer than this one: a head that is being
        written may be visible to one read of the store and not to the next.
        """
        earlier, requested = self._head, self._requested
        usable = not requested or (
            earlier is not None
            and requested[0].after == after
            and earlier.incarnation == head.incarnation
            and earlier.position <= head.position
        )
        if not usable:
            self.close()
        if not requested:
            self._begin = self._end = after
        self._head, self._to = head, to
        self._events = partial(self._store.events, self._key, head)
        return usable

    def prefetch(self) -> None:
        """Request the next ranges; the requests are sent in the next iteration of the event loop."""
        while self.dense and self._end < self._to and len(self._requested) < RANGES_IN_FLIGHT_MAX:
            after, to = self.next_range()
            rows = self._events(after=after, to=to, limit=to - after)
            self.add(PrefetchedRange(after, to, to - after, asyncio.ensure_future(rows)))
        if not self._requested and self._end < self._to:
            part = self._rest(self._end)
            self.add(part._replace(rows=asyncio.ensure_future(part.rows)))

    def add(self, part: PrefetchedRange) -> None:
        """Add a request; `take` returns the rows of requests in the order in which they were added."""
        self._requested.append(part)
        self._end = part.to

    def next_range(self) -> tuple[int, int]:
        """Return the bounds of the next request, within one segment: the store queries each segment separately."""
        assert self._head is not None
        size = self._head.segment_size
        first = self._end < self._begin + self._limit
        part = max(1, self._limit // FIRST_PAGE_PARTS) if first else self._limit
        return self._end, min(self._end + part, (self._end // size + 1) * size, self._to)

    async def take(self, after: int) -> Sequence[EventRow]:
        """Return the next rows after `after`; they are empty only if there are no more."""
        part = self._requested.popleft() if self._requested else self._rest(after)
        rows = await part.rows
        if not rows and part.to < self._to:  # there may be rows after this range
            self.close()
            part = self._rest(after)
            rows = await part.rows
        last = rows[-1].seq_nr if rows else after
        self.dense = last - after == len(rows) > 0 and (len(rows) == part.limit or last == part.to)
        if not self.dense:
            self.close()
        if not self._requested:
            self._end = last if rows else self._to
        return rows

    def _rest(self, after: int) -> PrefetchedRange:
        rows = self._events(after=after, to=self._to, limit=self._limit)
        return PrefetchedRange(after, self._to, self._limit, rows)

    def close(self) -> None:
        """Cancel the requests in flight."""
        for part in self._requested:
            if isinstance(part.rows, asyncio.Future):
                cancel_quietly(part.rows)
        self._requested.clear()
