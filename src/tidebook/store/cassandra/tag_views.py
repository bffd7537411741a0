"""Streams by tag on Cassandra: find a tag's buckets, read pages within them, and clear tag rows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import chain
from typing import Any, Final, Protocol, TypeVar

from tidebook.core.buckets import BUCKETS_SETTING, SIZES_MS, Buckets, decode_buckets, encode_buckets
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.core.position import tombstone_stamp
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import ClearEvents, ClearJournal, PutTags, SliceWrites, TagPosition, TagRow
from tidebook.core.segments import head_segment
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.errors import PERHAPS_TOO_LARGE, TIMEOUTS
from tidebook.store.cassandra.mutations import Batch, CqlStatement
from tidebook.store.cassandra.scan import EventPages, PageSizes
from tidebook.store.cassandra.session import SERIAL_ATTEMPTS, CassandraSession, all_columns, first_column, read_rows
from tidebook.store.cassandra.tag_writes import clear_batches, tag_batches, tag_positions, tag_row, tag_row_or_damage

#: How often the history is read again for times after its fixed part; in between, the tag's buckets are queried.
READ_EVERY_S: Final = 15.0
#: The result of `bucket_start` before the first bucket.
NONE_BEFORE: Final = -1


class BucketSettings(Protocol):
    """The methods of a store that `TagBuckets` needs."""

    def setting(self, name: str) -> Awaitable[str | None]: ...

    def set_setting(self, name: str, value: str, *, expected: str | None) -> Awaitable[bool]: ...


class TagBuckets:
    """The history of bucket sizes, as last read by this process.

    Before `fixed_ms` the history never changes, so a cached copy is valid however old it is. No row is written at or
    after `fixed_ms`: a writer with such a row first moves `fixed_ms` forward. A change of the size swaps the same
    setting, so neither overlooks the other.
    """

    def __init__(self, session: CassandraSession, settings: BucketSettings) -> None:
        self._session = session
        self._settings = settings
        self._known = Buckets()
        self._read_s: float | None = None
        self._fixing = asyncio.Lock()

    async def fixed_at(self, time_ms: int) -> Buckets:
        """Return the history for rows up to and including `time_ms`; first extend its fixed part if necessary."""
        if time_ms >= self._known.fixed_ms:
            async with self._fixing:  # a concurrent caller in this process may have extended it meanwhile
                if time_ms >= self._known.fixed_ms:
                    self._known = await self._fix(time_ms)
        return self._known

    async def _fix(self, time_ms: int) -> Buckets:
        for _ in range(SERIAL_ATTEMPTS):
            text, found = await self._read()
            if time_ms < found.fixed_ms:
                return found
            after = found.fixed(time_ms)
            try:
                if await self._settings.set_setting(BUCKETS_SETTING, encode_buckets(after), expected=text):
                    return after
            except OutcomeUnknown:
                pass  # the next attempt reads the current value
        raise Unavailable(
            "the fixed part of the history of bucket sizes could not be extended while others changed it: retry"
        )

    async def _read(self) -> tuple[str | None, Buckets]:
        text = await self._settings.setting(BUCKETS_SETTING)
        return text, Buckets() if text is None else decode_buckets(text)

    async def bucket_start(self, tag: str, time_ms: int) -> int:
        """Return the start of the bucket that has a tag's rows of a time; -1 if the tag has none at or before it.

        The known history decides if the time is in its fixed part; otherwise the tag's buckets are queried.
        """
        now_s = asyncio.get_running_loop().time()
        if time_ms >= self._known.fixed_ms and (self._read_s is None or now_s - self._read_s > READ_EVERY_S):
            self._read_s = now_s
            _, self._known = await self._read()
        if time_ms < self._known.fixed_ms:
            return self._known.start(time_ms)
        found = [row.as_tuple()[0] for row in await self._session.read(cql.TAG_BUCKET_AT, [tag, time_ms])]
        return found[0] if found else NONE_BEFORE


BUCKETS_PER_QUERY: Final = 500
BUCKETS_AT_ONCE_MAX: Final = 32
CLEAR_PAGE: Final = 1000
CLEARS_AT_ONCE_MAX: Final = 32
BUCKET_MS_MAX: Final = max(SIZES_MS.values())
#: The time range of a page is divided by this when a page fails, and multiplied by `WIDER` after each page that
#: succeeds.
NARROWER: Final = 16
WIDER: Final = 4
#: Consecutive failures allowed: five of them narrow a day to about 80 ms.
FAILURES_MAX: Final = 5
#: The timeout of the one-row probe after a page timed out; nodes that miss it count as down.
PROBE_S: Final = 0.5
#: Sorts before every row of the same time.
_FIRST: Final = ("", -1, -1, -1, -1)


T = TypeVar("T")
#: Decodes a row from a tag and its columns.
RowDecoder = Callable[[str, tuple[Any, ...]], T]


class TagViews:
    """Reads the tag rows of one store, and converts writes and clears of them into batches."""

    def __init__(
        self,
        session: CassandraSession,
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

    async def rows(self, tag: str, after: TagPosition | None, from_ms: int, until_ms: int, limit: int) -> list[TagRow]:
        """Return the next page of a stream, over as many buckets as needed; large rows make it shorter than `limit`."""
        return await self._stream(tag, after, from_ms, until_ms, limit, tag_row)

    async def inspected_rows(
        self, tag: str, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> list[TagRow | Damage]:
        """Return the same page as `rows`, for a repair: a row that cannot be decoded is returned as `Damage`."""
        return await self._stream(tag, after, from_ms, until_ms, limit, tag_row_or_damage)

    async def _stream(
        self, tag: str, after: TagPosition | None, from_ms: int, until_ms: int, limit: int, decode: RowDecoder[T]
    ) -> list[T]:
        limit = self._sizes.rows(tag, limit)
        after_key: list[Any] = [from_ms, *_FIRST]
        if after is not None and after.time_ms >= from_ms:
            after_key = [after.time_ms, after.topic, after.partition, after.offset, after.index, after.epoch]
        bucket = await self._buckets.bucket_start(tag, after_key[0])
        found = await self._page(tag, bucket, after_key, until_ms, limit, decode)
        at_once = 1
        while len(found) < limit:
            values = [tag, bucket, BUCKETS_PER_QUERY]
            starts = deque(
                await read_rows(self._session, cql.TAG_BUCKETS, values, limit=BUCKETS_PER_QUERY, decode=first_column)
            )
            listed = len(starts)
            while starts and len(found) < limit:
                chunk = [starts.popleft() for _ in range(min(at_once, len(starts)))]
                bucket = chunk[-1]
                pages = (self._page(tag, each, after_key, until_ms, limit - len(found), decode) for each in chunk)
                rows = [row for page in await asyncio.gather(*pages) for row in page]
                found += rows[: limit - len(found)]
                # A listed bucket without rows had all of them deleted, and many may follow: read more of them at once.
                at_once = 1 if rows else min(at_once * 2, BUCKETS_AT_ONCE_MAX)
                if bucket >= until_ms:
                    return found
            if listed < BUCKETS_PER_QUERY:
                return found
        return found

    async def _page(
        self, tag: str, bucket: int, after_key: list[Any], until_ms: int, limit: int, decode: RowDecoder[T]
    ) -> list[T]:
        """Return rows of one bucket, narrowing the time range when a page fails.

        A delete leaves one tombstone per row, and Cassandra aborts a read over too many tombstones.
        """
        end_ms = min(until_ms, bucket + BUCKET_MS_MAX)
        found: list[T] = []
        failures = 0
        while True:
            begin_ms = max(after_key[0], bucket)
            if begin_ms >= end_ms:
                return found  # the range is empty: a new topic may move the horizon back before delivered events
            to_ms = min(end_ms, begin_ms + self._window_ms)
            try:
                found += await self._rows(tag, [tag, bucket, *after_key, to_ms, limit - len(found)], decode)
            except Unavailable as error:
                window_ms, failures = (to_ms - begin_ms) // NARROWER, failures + 1
                if not isinstance(error.__cause__, PERHAPS_TOO_LARGE) or not window_ms or failures > FAILURES_MAX:
                    raise
                timed_out = isinstance(error.__cause__, TIMEOUTS)
                if timed_out and not await self._nodes_answer(tag, bucket, after_key, begin_ms):
                    raise
                self._window_ms = window_ms
                continue
            failures = 0
            self._window_ms = min(self._window_ms * WIDER, BUCKET_MS_MAX)
            if len(found) >= limit or to_ms >= end_ms:
                return found
            after_key = [to_ms, *_FIRST]

    async def _nodes_answer(self, tag: str, bucket: int, after_key: list[Any], begin_ms: int) -> bool:
        """Return whether the bucket's nodes answer at all: if so, a smaller page is worth trying."""
        values = [tag, bucket, *after_key, begin_ms + 1, 1]
        try:
            await asyncio.wait_for(self._session.read(cql.TAG_ROWS, values, page_size=1), PROBE_S)
        except (Unavailable, TimeoutError):
            return False
        return True

    async def _rows(self, tag: str, values: list[Any], decode: RowDecoder[T]) -> list[T]:
        self._metrics.count("tag_pages")
        try:
            columns = await read_rows(self._session, cql.TAG_ROWS, values, limit=values[-1], decode=all_columns)
        except Unavailable as error:
            if isinstance(error.__cause__, PERHAPS_TOO_LARGE):
                self._sizes.timed_out(tag)
            raise
        self._sizes.record(tag, len(columns), sum(len(each[-1]) for each in columns))
        return [decode(tag, each) for each in columns]

    # Writing

    async def clear_rounds(self, writes: SliceWrites, segments: int) -> AsyncIterator[Iterator[Batch]]:
        """Yield the rounds that clear the slice's tag rows, before all its other writes; each round is acknowledged.

        Tag rows are found through event rows, so they must be cleared before the events' tombstones are written.
        Clearing them before the head is written is safe: a reader can only miss rows that are about to be deleted.
        """
        clears = [
            write
            for of_key in writes.keys
            for write in of_key
            if isinstance(write, ClearEvents | ClearJournal)
            and write.clear_tags
            and (isinstance(write, ClearJournal) or write.head.tag_counts or write.unwritten)
        ]
        if not clears:
            return
        buckets = await self._buckets.fixed_at(writes.pointer.time_ms)
        for first in range(0, len(clears), CLEARS_AT_ONCE_MAX):
            chunk = clears[first : first + CLEARS_AT_ONCE_MAX]
            running = [self._clear(clear, writes.partition, buckets, segments) for clear in chunk]
            # Each round has one page of each journal: journals are cleared concurrently, and each of them in its order.
            while running:
                pages = await asyncio.gather(*(anext(each, None) for each in running))
                running = [each for each, page in zip(running, pages, strict=True) if page is not None]
                if running:
                    yield chain.from_iterable(page for page in pages if page is not None)

    async def put_batches(self, writes: SliceWrites, segments: int) -> Iterator[Batch]:
        """Return the slice's tag rows as batches, to be acknowledged before any head that counts them."""
        puts = [write for of_key in writes.keys for write in of_key if isinstance(write, PutTags)]
        if not puts:
            return iter(())
        buckets = await self._buckets.fixed_at(writes.pointer.time_ms)
        return tag_batches(puts, buckets, segments, rows_max=self._batch_rows_max)

    async def _clear(
        self, write: ClearEvents | ClearJournal, partition: int, buckets: Buckets, segments: int
    ) -> AsyncIterator[Iterator[Batch]]:
        """Yield the batches that clear a journal's tag rows, page by page, because a journal may be long."""
        head = write.head
        yield clear_batches(write.unwritten, head.position, buckets)
        after, to = (write.above, head.delete_to) if isinstance(write, ClearEvents) else (0, head.seq_nr)
        while after < to:
            rows = await self._pages.read(write.key, head, after=after, to=to, limit=CLEAR_PAGE)
            if not rows:
                break
            positions = [position for row in rows for position in tag_positions(write.key, partition, row)]
            yield clear_batches(positions, head.position, buckets)
            after = rows[-1].seq_nr
        if isinstance(write, ClearJournal):
            topic, id = write.key
            values = [tombstone_stamp(head.position), topic, head_segment(id, segments), id]
            yield iter([[CqlStatement(cql.CLEAR_TAG_PROGRESS, values)]])
