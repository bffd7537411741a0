"""Reading many rows: pages of events over segments, and all rows of a topic segment by segment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.metrics import Metrics
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, segments_between
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.failures import TIMED_OUT
from tidebook.store.cassandra.page_size import PageSizes
from tidebook.store.cassandra.rows import decode_rows
from tidebook.store.cassandra.session import Session

#: How many segments are asked for at once where one alone cannot fill the page, or came back empty.
SEGMENTS_AT_ONCE_MAX: Final = 32
SCANS_AT_ONCE: Final = 16
#: Pages that were asked for before anybody wanted them, over all reads of a store.
AHEAD_PAGES_MAX: Final = 8
AHEAD_S_MAX: Final = 2.0


class Wanted(NamedTuple):
    """A page, told apart from those of another read: by where it begins and by the head its reader planned with."""

    key: Key
    as_of: Position
    after: int
    to: int
    limit: int


class EventPages:
    """Pages of events, over gaps, segment borders and jumps.

    Who has asked for a second page is given the third sooner: it is read while they use the second. A page read ahead
    was read after the head that its reader holds, and the reader checks the head again once it has the page, so it
    stands or falls as if it had been read when it was asked for.
    """

    def __init__(self, session: Session, metrics: Metrics) -> None:
        self._session = session
        self._metrics = metrics
        self._sizes = PageSizes()
        self._ahead: dict[Wanted, asyncio.Task[list[bytes]]] = {}
        #: Where pages ended that were not the last of their read.
        self._ends: dict[Wanted, None] = {}

    async def read(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> list[EventRow]:
        """The next rows of a journal: at least one where there is one, at most `limit`, and not too many bytes."""
        wanted = Wanted(key, head.position, after, to, limit)
        ahead = self._ahead.pop(wanted, None)
        going_on = ahead is not None or self._ends.pop(wanted, 0) is None
        cells = await (ahead or self._cells(key, head, after, to, limit))
        rows = decode_rows(cells)
        if rows and rows[-1].seq_nr < to:
            following = Wanted(key, head.position, rows[-1].seq_nr, to, limit)
            if going_on and len(self._ahead) < AHEAD_PAGES_MAX:
                self._read_ahead(following, head)
            else:
                self._ends[following] = None
                if len(self._ends) > 100 * AHEAD_PAGES_MAX:
                    del self._ends[next(iter(self._ends))]
        return rows

    def _read_ahead(self, wanted: Wanted, head: Head) -> None:
        task = asyncio.ensure_future(self._cells(wanted.key, head, wanted.after, wanted.to, wanted.limit))
        task.add_done_callback(_looked_at)
        self._ahead[wanted] = task
        asyncio.get_running_loop().call_later(AHEAD_S_MAX, self._forget, wanted, task)
        self._metrics.count("cassandra_pages_ahead")

    def _forget(self, wanted: Wanted, task: asyncio.Task[list[bytes]]) -> None:
        """Nobody came for it."""
        if self._ahead.get(wanted) is task:
            del self._ahead[wanted]
            task.cancel()

    def close(self) -> None:
        """Give up what was read ahead."""
        for task in self._ahead.values():
            task.cancel()
        self._ahead.clear()

    async def _cells(self, key: Key, head: Head, after: int, to: int, limit: int) -> list[bytes]:
        segments = chain.from_iterable(segments_between(head, after, to))
        limit = self._sizes.rows(key.topic, limit)
        at_once = min(max(limit // head.segment_size, 1), SEGMENTS_AT_ONCE_MAX)
        while some := list(islice(segments, at_once)):
            if len(some) == 1:
                cells = await self._segment(key, some[0], after, to, limit)
            else:
                found = await asyncio.gather(*(self._segment(key, each, after, to, limit) for each in some))
                cells = list(chain.from_iterable(found))[:limit]
            if cells:
                self._sizes.saw(key.topic, len(cells), sum(map(len, cells)))
                return cells
            # Nothing there: what follows may be empty for long, so it is asked for in ever larger steps.
            at_once = min(at_once * 2, SEGMENTS_AT_ONCE_MAX)
        return []

    async def _segment(self, key: Key, segment: int, after: int, to: int, limit: int) -> list[bytes]:
        values = [key.id, key.topic, segment, after, to, limit]
        try:
            page = await self._session.read(cql.EVENTS, values, page_size=limit)
        except Unavailable as error:
            if isinstance(error.__cause__, TIMED_OUT):
                self._sizes.timed_out(key.topic)
            raise
        return [row.column_value_by_index(0) for row in page]


def _looked_at(task: asyncio.Task[list[bytes]]) -> None:
    """A failure that nobody came for is nobody's."""
    if not task.cancelled():
        task.exception()


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
