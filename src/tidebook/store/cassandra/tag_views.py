"""Streams by tag on Cassandra: which buckets there are, pages within them, and what clears reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from tidebook.core.buckets import BUCKETS_SETTING, Buckets, decode_buckets
from tidebook.core.metrics import Metrics
from tidebook.core.position import tombstone_stamp
from tidebook.core.replication import ClearEvents, ClearJournal, PutTags, SliceWrites, TagPlace, TagRow
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import Batch, Statement
from tidebook.store.cassandra.scan import EventPages
from tidebook.store.cassandra.session import Session
from tidebook.store.cassandra.tag_writes import clear_batches, places_of, tag_batches, tag_row

#: The history of sizes is read again after this time: well within the minute that a change lies ahead.
REFRESH_S: Final = 15.0
BUCKETS_PER_QUERY: Final = 500
CLEAR_PAGE: Final = 1000
POLL_FIRST_S: Final = 0.02
POLL_MAX_S: Final = 0.25
PAUSES_MAX: Final = 20


class TagViews:
    """The tag tables of one store."""

    def __init__(
        self,
        session: Session,
        pages: EventPages,
        setting: Callable[[str], Awaitable[str | None]],
        metrics: Metrics,
        *,
        batch_rows_max: int,
    ) -> None:
        self._session = session
        self._pages = pages
        self._setting = setting
        self._metrics = metrics
        self._batch_rows_max = batch_rows_max
        self._buckets: Buckets | None = None
        self._read_at = 0.0

    async def buckets(self) -> Buckets:
        """How streams are cut, as of a few seconds ago."""
        now = asyncio.get_running_loop().time()
        if self._buckets is None or now - self._read_at > REFRESH_S:
            text = await self._setting(BUCKETS_SETTING)
            self._buckets = Buckets() if text is None else decode_buckets(text)
            self._read_at = now
        return self._buckets

    # Reading

    async def rows(self, tag: str, after: TagPlace | None, from_ms: int, until_ms: int, limit: int) -> list[TagRow]:
        """The next page of a stream, over as many buckets as it takes."""
        cut = await self.buckets()
        behind: list[object] = [from_ms, "", -1, -1, -1, -1]
        if after is not None and after.time_ms >= from_ms:
            behind = [after.time_ms, after.topic, after.partition, after.offset, after.index, after.epoch]
        bucket = cut.start(max(from_ms, after.time_ms if after is not None else from_ms))
        found = await self._page(tag, bucket, behind, until_ms, limit)
        while len(found) < limit:
            following = await self._session.read(cql.TAG_BUCKETS, [tag, bucket, BUCKETS_PER_QUERY])
            starts = [row.as_tuple()[0] for row in following]
            for bucket in starts:
                if bucket >= until_ms:
                    return found
                found += await self._page(tag, bucket, behind, until_ms, limit - len(found))
                if len(found) >= limit:
                    return found
            if len(starts) < BUCKETS_PER_QUERY:
                return found
        return found

    async def _page(self, tag: str, bucket: int, behind: list[object], until_ms: int, limit: int) -> list[TagRow]:
        values = [tag, bucket, *behind, until_ms, limit]
        rows = await self._session.read(cql.TAG_ROWS, values, page_size=limit)
        self._metrics.count("tag_pages")
        return [tag_row(tag, row.as_tuple()) for row in rows]

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

    async def rounds_of(self, writes: SliceWrites) -> AsyncIterator[Iterator[Batch]]:
        """What a slice does to tag rows: what it clears, then what it puts, each round acknowledged.

        All of it comes before the slice's own rounds. A clear is found through event rows, so it must come before
        their tombstones; coming before the head too shows nobody more than a row that is about to go.
        """
        puts = [write for of_key in writes.keys for write in of_key if isinstance(write, PutTags)]
        clears = [
            write
            for of_key in writes.keys
            for write in of_key
            if isinstance(write, ClearEvents | ClearJournal)
            and write.clear_tags
            and (write.head.tag_counts or write.unwritten)
        ]
        if not puts and not clears:
            return
        cut = await self.buckets()
        for clear in clears:
            async for batches in self._clear(clear, writes.partition, cut):
                yield batches
        yield tag_batches(puts, cut, rows_max=self._batch_rows_max)

    async def _clear(
        self, write: ClearEvents | ClearJournal, partition: int, cut: Buckets
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
            yield iter([[Statement(cql.CLEAR_TAG_PROGRESS, [tombstone_stamp(head.position), *write.key])]])
