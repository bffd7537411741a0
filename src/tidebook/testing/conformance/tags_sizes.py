"""Test cases of streams by tag: the bucket size changes, and a process does not notice or is late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tidebook.core.buckets import BUCKETS_SETTING, SIZES_MS, decode_buckets
from tidebook.core.event import Event
from tidebook.store.port import StoreWriter
from tidebook.tags.tags import Tags
from tidebook.testing.conformance.journal_base import BookFactory
from tidebook.testing.conformance.tags_base import HOUR_MS, OPTIONS, TagsBase
from tidebook.wiring.book import Book

#: Times relative to a change of the bucket size.
AHEAD_MS = (-1, 0, 1, 90_000, 150_000, 3 * HOUR_MS)


class PausedBeforeChanging:
    """A store that runs `meanwhile` after its caller has decided on a change and before the change is written."""

    def __init__(self, store: StoreWriter, meanwhile: Callable[[int], Awaitable[None]]) -> None:
        self._store = store
        self._meanwhile: Callable[[int], Awaitable[None]] | None = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        if name == BUCKETS_SETTING and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            await meanwhile(decode_buckets(value).changes[-1].from_ms)
        return await self._store.set_setting(name, value, expected=expected)


class TagsSizes(TagsBase):
    """Test cases of bucket size changes that a process misses."""

    async def test_a_process_that_missed_a_change_of_the_bucket_size_writes_and_reads_as_the_others_do(
        self, book_factory: BookFactory, topic: str, tag: str
    ) -> None:
        """As on a suspended machine, the clock of the paused process stops, while the log time advances."""
        async with book_factory(**OPTIONS) as paused, book_factory(**OPTIONS) as other:
            await paused.journal(topic).append("a", [Event(0, tags={tag})])
            await self.settle(paused, topic)
            assert len(await self.read(paused, tag, topic)) == 1
            count = 1
            for size in SIZES_MS:  # the first may be the current size; each later one is a change
                sizes = await other.tags.set_bucket_size(size)
                for ahead_ms in AHEAD_MS:
                    writer = paused if count % 3 else other
                    await self.append_at(writer, topic, tag, sizes.changes[-1].from_ms + ahead_ms, count)
                    count += 1
            for book in (paused, other):
                await self.check(book, topic, tag, count)

    async def test_a_late_change_of_the_bucket_size_does_not_affect_written_buckets(
        self, book: Book, book_factory: BookFactory, topic: str, tag: str
    ) -> None:
        count = 0

        async def append_around(from_ms: int) -> None:
            nonlocal count
            for ahead_ms in AHEAD_MS:
                await self.append_at(book, topic, tag, from_ms + ahead_ms, count)
                count += 1

        await book.journal(topic).append("b", [Event("no tag")])
        for size in SIZES_MS:
            tags = Tags(store=PausedBeforeChanging(book.store, append_around), clock=book.clock)
            assert (await tags.set_bucket_size(size)).changes[-1].size == size
        async with book_factory(**OPTIONS) as another:  # a new process, whose only state is the store
            await self.check(another, topic, tag, count)

    async def append_at(self, book: Book, topic: str, tag: str, time_ms: int, payload: int) -> None:
        await self.advance(book, topic, time_ms)
        await book.journal(topic).append("a", [Event(payload, tags={tag})])
        await self.settle(book, topic)

    async def check(self, book: Book, topic: str, tag: str, count: int) -> None:
        """Assert that all events are read, and that a read resumed after each of them returns the rest."""
        events = await self.read(book, tag, topic)
        assert [event.payload for event in events] == list(range(count))
        for n, event in enumerate(events):
            assert await self.read(book, tag, topic, after=event.tag_offset) == events[n + 1 :]
