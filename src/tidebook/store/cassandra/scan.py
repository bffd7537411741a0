"""Reading many rows: pages of events over segments, and all rows of a topic segment by segment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import chain, islice
from typing import Any, Final

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication import EventRow, segments_between
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.rows import decode_rows
from tidebook.store.cassandra.session import Session

#: How many segments are asked for at once where one alone cannot fill the page, or came back empty.
SEGMENTS_AT_ONCE_MAX: Final = 32
SCANS_AT_ONCE: Final = 8


async def read_events(session: Session, key: Key, head: Head, *, after: int, to: int, limit: int) -> list[EventRow]:
    """The next rows of a journal. Segments that turn out empty are passed over, more and more of them at once."""
    segments: Iterator[int] = chain.from_iterable(segments_between(head, after, to))
    at_once = min(max(limit // head.segment_size, 1), SEGMENTS_AT_ONCE_MAX)
    while some := list(islice(segments, at_once)):
        if len(some) == 1:
            rows = await _segment(session, key, some[0], after, to, limit)
        else:
            found = await asyncio.gather(*(_segment(session, key, each, after, to, limit) for each in some))
            rows = list(chain.from_iterable(found))[:limit]
        if rows:
            return decode_rows(rows)
        at_once = min(at_once * 2, SEGMENTS_AT_ONCE_MAX)
    return []


async def _segment(
    session: Session, key: Key, segment: int, after: int, to: int, limit: int
) -> list[tuple[int, bytes]]:
    values = [key.id, key.topic, segment, after, to, limit]
    page = await session.read(cql.EVENTS, values, page_size=limit)
    return [row.as_tuple() for row in page]


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
