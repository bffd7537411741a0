"""Streams by tag on Cassandra: which buckets there are, pages within them, and what clears reach."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any, Final

from tidebook.core.buckets import SIZES_MS, Buckets
from tidebook.core.errors import Unavailable
from tidebook.core.metrics import Metrics
from tidebook.core.position import tombstone_stamp
from tidebook.core.replication import ClearEvents, ClearJournal, PutTags, SliceWrites, TagPlace, TagRow
from tidebook.core.segments import head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.failures import TIMED_OUT, TOO_LATE
from tidebook.store.cassandra.mutations import Batch, Statement
from tidebook.store.cassandra.page_size import PageSizes
from tidebook.store.cassandra.scan import EventPages
from tidebook.store.cassandra.session import Session
from tidebook.store.cassandra.tag_buckets import TagBuckets
from tidebook.store.cassandra.tag_writes import clear_batches, places_of, tag_batches, tag_row

BUCKETS_PER_QUERY: Final = 500
BUCKETS_AT_ONCE_MAX: Final = 32
CLEAR_PAGE: Final = 1000
CLEARS_AT_ONCE_MAX: Final = 32
POLL_FIRST_S: Final = 0.02
POLL_MAX_S: Final = 0.25
PAUSES_MAX: Final = 20
BUCKET_MS_MAX: Final = max(SIZES_MS.values())
#: How much of a bucket's time is read at once where pages are given up: a sixteenth, and then more again.
NARROWER: Final = 16
WIDER: Final = 4
#: How often in a row: a day is some milliseconds then.
GIVEN_UP_MAX: Final = 5
#: Who did not send a page in time answers a question for one row within this time, or is down.
PROBE_S: Final = 0.5
#: What comes before all that has the same time.
_FIRST: Final = ("", -1, -1, -1, -1)


class TagViews:
    """The tag tables of one store."""

    def __init__(
        self,
        session: Session,
        pages: EventPages,
        buckets: TagBuckets,
        metrics: Metrics,
        *,
        batch_rows_max: int,
    ) -> None:
        self._session = session
        self._pages = pages
        self._buckets = buckets
        self._metrics = metrics
        self._batch_rows_max = batch_rows_max
        self._sizes = PageSizes()
        self._window_ms = BUCKET_MS_MAX

    # Reading

    async def rows(self, tag: str, after: TagPlace | None, from_ms: int, until_ms: int, limit: int) -> list[TagRow]:
        """The next page of a stream, over as many buckets as it takes; fewer rows than `limit` where they are large."""
        limit = self._sizes.rows(tag, limit)
        behind: list[Any] = [from_ms, *_FIRST]
        if after is not None and after.time_ms >= from_ms:
            behind = [after.time_ms, after.topic, after.partition, after.offset, after.index, after.epoch]
        bucket = await self._buckets.begin(tag, behind[0])
        found = await self._page(tag, bucket, behind, until_ms, limit)
        at_once = 1
        while len(found) < limit:
            following = await self._session.read(cql.TAG_BUCKETS, [tag, bucket, BUCKETS_PER_QUERY])
            starts = deque(row.as_tuple()[0] for row in following)
            listed = len(starts)
            while starts and len(found) < limit:
                some = [starts.popleft() for _ in range(min(at_once, len(starts)))]
                bucket = some[-1]
                pages = (
                    self._page(tag, each, behind, until_ms, limit - len(found)) for each in some if each < until_ms
                )
                rows = [row for page in await asyncio.gather(*pages) for row in page]
                found += rows[: limit - len(found)]
                # All of it was deleted: that may go on for long, so what follows is asked for in ever larger steps.
                at_once = 1 if rows else min(at_once * 2, BUCKETS_AT_ONCE_MAX)
                if bucket >= until_ms:
                    return found
            if listed < BUCKETS_PER_QUERY:
                return found
        return found

    async def _page(self, tag: str, bucket: int, behind: list[Any], until_ms: int, limit: int) -> list[TagRow]:
        """Rows of one bucket. A delete leaves a tombstone a row, and Cassandra gives a page up that has too many."""
        end_ms = min(until_ms, bucket + BUCKET_MS_MAX)
        found: list[TagRow] = []
        given_up = 0
        while True:
            begin_ms = max(behind[0], bucket)
            if begin_ms >= end_ms:
                return found  # a horizon may lie before what was delivered: a topic that is new holds it
            to_ms = min(end_ms, begin_ms + self._window_ms)
            try:
                found += await self._rows(tag, [tag, bucket, *behind, to_ms, limit - len(found)])
            except Unavailable as error:
                window_ms, given_up = (to_ms - begin_ms) // NARROWER, given_up + 1
                if not isinstance(error.__cause__, TIMED_OUT) or not window_ms or given_up > GIVEN_UP_MAX:
                    raise
                if isinstance(error.__cause__, TOO_LATE) and not await self._answers(tag, bucket, behind, begin_ms):
                    raise
                self._window_ms = window_ms
                continue
            given_up = 0
            self._window_ms = min(self._window_ms * WIDER, BUCKET_MS_MAX)
            if len(found) >= limit or to_ms >= end_ms:
                return found
            behind = [to_ms, *_FIRST]

    async def _answers(self, tag: str, bucket: int, behind: list[Any], begin_ms: int) -> bool:
        """Whether the nodes that have a bucket are there at all: then it is worth while to ask for less."""
        values = [tag, bucket, *behind, begin_ms + 1, 1]
        try:
            await asyncio.wait_for(self._session.read(cql.TAG_ROWS, values, page_size=1), PROBE_S)
        except (Unavailable, TimeoutError):
            return False
        return True

    async def _rows(self, tag: str, values: list[Any]) -> list[TagRow]:
        self._metrics.count("tag_pages")
        try:
            rows = await self._session.read(cql.TAG_ROWS, values, page_size=values[-1])
        except Unavailable as error:
            if isinstance(error.__cause__, TIMED_OUT):
                self._sizes.timed_out(tag)
            raise
        found = [tag_row(tag, row.as_tuple()) for row in rows]
        self._sizes.saw(tag, len(found), sum(len(row.kept) for row in found))
        return found

    async def names(self) -> list[str]:
        """The tags that have, or had, rows."""
        found: list[str] = []
        async for page in self._session.pages(cql.TAGS, [], page_size=5000):
            found += (row.as_tuple()[0] for row in page)
        return sorted(found)

    async def pause(self, timeout_s: float, since: int) -> int:
        """Cassandra cannot tell who moved: look again soon, and less often while nothing comes.

        `since` counts a waiter's pauses; one that found something begins again at -1.
        """
        pauses = min(max(since, 0), PAUSES_MAX)
        await asyncio.sleep(min(POLL_FIRST_S * 1.3**pauses, POLL_MAX_S, timeout_s))
        return pauses + 1

    # Writing

    async def clears_of(self, writes: SliceWrites, segments: int) -> AsyncIterator[Iterator[Batch]]:
        """What a slice clears of tag rows, before all else that it does, each round acknowledged.

        A clear is found through event rows, so it must come before their tombstones; coming before the head too shows
        nobody more than a row that is about to go.
        """
        clears = [
            write
            for of_key in writes.keys
            for write in of_key
            if isinstance(write, ClearEvents | ClearJournal)
            and write.clear_tags
            and (write.head.tag_counts or write.unwritten)
        ]
        if not clears:
            return
        cut = await self._buckets.fixed_at(writes.pointer.time_ms)
        for first in range(0, len(clears), CLEARS_AT_ONCE_MAX):
            some = clears[first : first + CLEARS_AT_ONCE_MAX]
            running = [self._clear(clear, writes.partition, cut, segments) for clear in some]
            # A page of each journal a round: its own order holds, and a slice does not wait for one after the other.
            while running:
                pages = await asyncio.gather(*(anext(each, None) for each in running))
                running = [each for each, page in zip(running, pages, strict=True) if page is not None]
                if running:
                    yield chain.from_iterable(page for page in pages if page is not None)

    async def puts_of(self, writes: SliceWrites, segments: int) -> Iterator[Batch]:
        """What a slice writes of tag rows, to be acknowledged before any head that comes behind them."""
        puts = [write for of_key in writes.keys for write in of_key if isinstance(write, PutTags)]
        if not puts:
            return iter(())
        cut = await self._buckets.fixed_at(writes.pointer.time_ms)
        return tag_batches(puts, cut, segments, rows_max=self._batch_rows_max)

    async def _clear(
        self, write: ClearEvents | ClearJournal, partition: int, cut: Buckets, segments: int
    ) -> AsyncIterator[Iterator[Batch]]:
        """Page by page: a journal may be long."""
        head = write.head
        yield clear_batches(write.unwritten, head.position, cut)
        after, to = (write.above, head.delete_to) if isinstance(write, ClearEvents) else (0, head.seq_nr)
        while after < to:
            rows = await self._pages.read(write.key, head, after=after, to=to, limit=CLEAR_PAGE)
            if not rows:
                break
            places = [place for row in rows for place in places_of(write.key, partition, row)]
            yield clear_batches(places, head.position, cut)
            after = rows[-1].seq_nr
        if isinstance(write, ClearJournal):
            topic, id = write.key
            values = [tombstone_stamp(head.position), topic, head_segment(id, segments), id]
            yield iter([[Statement(cql.CLEAR_TAG_PROGRESS, values)]])
