"""Reading many rows: pages of events over segments, and all rows of a topic segment by segment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import chain, islice
from typing import Any, Final

from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication import EventRow, segments_between
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.failures import TIMED_OUT
from tidebook.store.cassandra.page_size import PAGE_ROWS_MIN, PageSizes
from tidebook.store.cassandra.rows import decode_rows
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
        """The next rows of a journal: at least one where there is one, at most `limit`, and not too many bytes."""
        return decode_rows(await self._cells(key, head, after, to, limit))

    async def _cells(self, key: Key, head: Head, after: int, to: int, limit: int) -> list[bytes]:
        if self._journals.knows(key):
            limit = self._journals.rows(key, limit)
        else:
            limit = self._topics.rows(key.topic, limit)
        try:
            return await self._page(key, head, after, to, limit)
        except Unavailable as error:
            if not isinstance(error.__cause__, TIMED_OUT):
                raise
            self._journals.timed_out(key)
            if limit <= PAGE_ROWS_MIN:
                raise
        # Perhaps it was too large, for earlier events tell nothing of these; a few are little, however large they are.
        return await self._page(key, head, after, to, PAGE_ROWS_MIN)

    async def _page(self, key: Key, head: Head, after: int, to: int, limit: int) -> list[bytes]:
        segments = chain.from_iterable(segments_between(head, after, to))
        at_once = min(max(limit // head.segment_size, 1), SEGMENTS_AT_ONCE_MAX)
        while some := list(islice(segments, at_once)):
            if len(some) == 1:
                cells = await self._range(key, some[0], after, to, limit)
            else:
                found = await asyncio.gather(*(self._range(key, each, after, to, limit) for each in some))
                cells = list(chain.from_iterable(found))[:limit]
            if cells:
                size_bytes = sum(map(len, cells))
                self._topics.saw(key.topic, len(cells), size_bytes)
                self._journals.saw(key, len(cells), size_bytes)
                return cells
            # Nothing there: what follows may be empty for long, so it is asked for in ever larger steps.
            at_once = min(at_once * 2, SEGMENTS_AT_ONCE_MAX)
        return []

    async def _range(self, key: Key, segment: int, after: int, to: int, limit: int) -> list[bytes]:
        values = [key.id, key.topic, segment, after, to, limit]
        page = await self._session.read(cql.EVENTS, values, page_size=limit)
        return [row.column_value_by_index(0) for row in page.all()]


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
