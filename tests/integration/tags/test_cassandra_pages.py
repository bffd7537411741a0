"""Pages of a stream on Cassandra: over tombstones, and of the largest events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tidebook.core.action import Mark
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.core.record import encode_record
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import TagPosition
from tidebook.log.port import Outgoing
from tidebook.replication.ticks import tick
from tidebook.store.cassandra.scan import PAGE_BYTES
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

pytestmark = pytest.mark.cassandra

#: More than Cassandra reads over before it gives a page up (`tombstone_failure_threshold`).
TOMBSTONES = 110_000


@pytest_asyncio.fixture
async def book(tmp_path: Path, cassandra_address: str) -> AsyncIterator[Book]:
    sections = {
        "store": Section(f"cassandra://{cassandra_address}/tag_pages"),
        "journal": Section(None, {"partitions": 1}),
    }
    async with Book(Settings(tmp_path, sections)) as book:
        yield book


@pytest.fixture
def topic() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"


async def settle(book: Book, topic: str) -> None:
    await replicate(book.log, book.store, topic)
    await tick(book.log, book.store, [topic])
    await replicate(book.log, book.store, topic)


@pytest.mark.long
async def test_a_stream_continues_after_more_deleted_events_than_cassandra_reads_over(book: Book, topic: str) -> None:
    tag = f"tag-{topic}"
    await book.journal(topic).append("a", [Event("before", tags={tag})])
    await settle(book, topic)
    (first,) = [event async for event in book.tags.read(tag, topics=[topic])]
    begin_ms = first.place.time_ms + 1
    key = Key(topic, "a")
    pointer, head = await book.store.pointer(topic, 0), await book.store.head(key)
    assert pointer is not None
    assert head is not None
    gone = tuple(TagPosition(tag, begin_ms + n // 100, topic, 0, 1000 + n, 0, 1) for n in range(TOMBSTONES))
    await book.store.repair(Repair(key=key, partition=0, pointer=pointer, rev=1, head=head, extra_tags=gone))
    config = await book.store.topic_config(topic)
    assert config is not None
    later = encode_record(Mark(config.epoch, gone[-1].time_ms + 1), limit_bytes=config.limit_bytes)
    await book.log.append(Outgoing(topic, 0, None, later))
    await book.journal(topic).append("a", [Event("after", tags={tag})])
    await settle(book, topic)
    events = [event async for event in book.tags.read(tag, topics=[topic])]
    assert [event.payload for event in events] == ["before", "after"]
    after = [event async for event in book.tags.read(tag, topics=[topic], after=first.tag_offset)]
    assert after == events[1:]


async def test_a_page_of_large_events_is_bounded_by_bytes(book: Book, topic: str) -> None:
    tag = f"tag-{topic}"
    size_bytes = 400_000
    for n in range(40):
        await book.journal(topic).append("a", [Event(bytes([n]) * size_bytes, tags={tag})])
    await settle(book, topic)
    rows, place = 0, None
    while page := await book.store.tag_rows(tag, after=place, from_ms=0, until_ms=2**62, limit=1000):
        assert sum(len(row.encoded) for row in page) <= max(PAGE_BYTES, 16 * (size_bytes + 100))
        rows, place = rows + len(page), page[-1].place
    assert rows == 40
