"""Reading many rows: pages of events over segments, and all rows of a topic segment by segment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from itertools import chain, islice
from typing import Any, Final

from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication import EventRow, segments_between
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.failures import TIMED_OUT
from tidebook.store.cassandra.page_size import PAGE_ROWS_MIN, PageSizes
from tidebook.store.cassandra.rows import EVENTS_A_ROW_MAX, decode_rows
from tidebook.store.cassandra.session import Session

#: How many segments are asked for at once where one alone cannot fill the page, or came back empty.
SEGMENTS_AT_ONCE_MAX: Final = 32
SCANS_AT_ONCE: Final = 16


class EventPages:
    """Pages of events, over gaps, segment borders and jumps."""

    def __init__(self, session: Session) -> None:
        self._session = session
        #: A journal's own events tell most; of one that was not read yet, those of its topic.
        self._journals = PageSizes()
        self._topics = PageSizes()

    async def read(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> list[EventRow]:
        """The next events of a journal: at least one where there is one, at most `limit`, and not too many bytes."""
        of: Hashable = key.topic
        sizes = self._topics
        if self._journals.knows(key):
            of, sizes = key, self._journals
        # No more rows than numbers: only where there are more numbers it matters how many events share a row.
        rows_max = min(limit, sizes.rows_of_events(of, limit)) if to - after > limit else sizes.rows(of, limit)
        try:
            return await self._page(key, head, after, to, limit, rows_max)
        except Unavailable as error:
            if not isinstance(error.__cause__, TIMED_OUT):
                raise
            self._journals.timed_out(key)
            if rows_max <= PAGE_ROWS_MIN:
                raise
        # Perhaps it was too large, for earlier events tell nothing of these; a few are little, however large they are.
        return await self._page(key, head, after, to, limit, PAGE_ROWS_MIN)

    async def cells(self, key: Key, segment: int, *, after: int, to: int, limit: int) -> list[bytes]:
        """Rows of one segment as they lie there: the first that reach beyond `after`, up to the one that holds `to`."""
        values = [key.id, key.topic, segment, after, to + EVENTS_A_ROW_MAX - 1, limit]
        page = await self._session.read(cql.EVENTS, values, page_size=limit)
        return [row.column_value_by_index(0) for row in page.all()]

    async def _page(self, key: Key, head: Head, after: int, to: int, limit: int, rows_max: int) -> list[EventRow]:
        segments = chain.from_iterable(segments_between(head, after, to))
        at_once = min(max(rows_max // head.segment_size, 1), SEGMENTS_AT_ONCE_MAX)
        while some := list(islice(segments, at_once)):
            if len(some) == 1:
                cells = await self.cells(key, some[0], after=after, to=to, limit=rows_max)
            else:
                asked = (self.cells(key, each, after=after, to=to, limit=rows_max) for each in some)
                cells = list(chain.from_iterable(await asyncio.gather(*asked)))[:rows_max]
            if cells:
                rows = decode_rows(cells)
                size_bytes = sum(map(len, cells))
                self._topics.saw(key.topic, len(cells), size_bytes, events=len(rows))
                self._journals.saw(key, len(cells), size_bytes, events=len(rows))
                if wanted := _between(rows, after, to)[:limit]:
                    return wanted
            # Nothing there: what follows may be empty for long, so it is asked for in ever larger steps.
            at_once = min(at_once * 2, SEGMENTS_AT_ONCE_MAX)
        return []


def _between(rows: list[EventRow], after: int, to: int) -> list[EventRow]:
    """Without what rows at the ends hold beside it."""
    if rows and (rows[0].seq_nr <= after or rows[-1].seq_nr > to):
        return [row for row in rows if after < row.seq_nr <= to]
    return rows


async def each_segment(
    session: Session, query: str, topic: str, segments: int, *, page_size: int
) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Pages of all rows of a topic in `metajournal`, a few segments asked for ahead."""
    ahead: dict[int, asyncio.Task[Any]] = {}
    try:
        for segment in range(segments):
            for next_one in range(segment, min(segment + SCANS_AT_ONCE, segments)):
                if next_one not in ahead:
                    first = session.read(query, [topic, next_one], page_size=page_size)
                    ahead[next_one] = asyncio.ensure_future(first)
            page = await ahead.pop(segment)
            yield [row.as_tuple() for row in page]
            while page.has_more_pages():
                page = await session.read(query, [topic, segment], page_size=page_size, page_state=page.page_state())
                yield [row.as_tuple() for row in page]
    finally:
        for task in ahead.values():
            task.cancel()
        await asyncio.gather(*ahead.values(), return_exceptions=True)
