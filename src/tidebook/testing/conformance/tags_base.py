"""Fixtures of the tag suite: a book, a unique topic and tag, and functions to append and replicate."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from datetime import datetime

import pytest
import pytest_asyncio

from tidebook.core.action import Mark
from tidebook.core.event import Event
from tidebook.core.record import encode_record
from tidebook.log.port import Outgoing
from tidebook.replication.ticks import tick
from tidebook.tags.event import TaggedEvent
from tidebook.testing.conformance.journal_base import BookFactory, BookSuite
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book

HOUR_MS = 3_600_000
OPTIONS = {"partitions": 2, "segment_size": 5, "page_events": 3}


class TagsBase(BookSuite):
    """Fixtures for the test cases of streams by tag."""

    @pytest.fixture
    def tag(self) -> str:
        return f"tag-{uuid.uuid4().hex[:12]}"

    @pytest_asyncio.fixture
    async def book(self, book_factory: BookFactory) -> AsyncIterator[Book]:
        async with book_factory(**OPTIONS) as book:
            yield book

    async def settle(self, book: Book, *topics: str) -> None:
        """Replicate everything, and advance the horizon past it."""
        for topic in topics:
            await replicate(book.log, book.store, topic)
        await tick(book.log, book.store, topics)
        for topic in topics:
            await replicate(book.log, book.store, topic)

    async def keep_deleted(self, book: Book, topic: str, tag: str) -> None:
        """Append six events, delete or purge five of them, and replicate so that the tag view keeps all six."""
        journal = book.journal(topic)
        await journal.append("cut", [Event(n, tags={tag}) for n in range(3)])
        await journal.append("gone", [Event(n, tags={tag}) for n in range(3)])
        await replicate(book.log, book.store, topic, clear_tags=False)
        await journal.delete("cut", to=2)
        await journal.purge("gone")
        await replicate(book.log, book.store, topic, clear_tags=False)
        await self.settle(book, topic)

    async def read(self, book: Book, tag: str, *topics: str, after: str | datetime | None = None) -> list[TaggedEvent]:
        return [event async for event in book.tags.read(tag, after=after, topics=topics)]

    async def advance(self, book: Book, topic: str, time_ms: int, *partitions: int) -> None:
        """Advance the log time to at least `time_ms`, as a tick of another topic would."""
        config = await book.store.topic_config(topic)
        assert config is not None
        value = encode_record(Mark(config.epoch, time_ms), limit_bytes=config.limit_bytes)
        for partition in partitions or range(config.partitions):
            await book.log.append(Outgoing(topic, partition, None, value))
