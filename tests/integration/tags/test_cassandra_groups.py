"""Groups on Cassandra: members join, leave and are killed, and no event is lost; also the rows of their progress."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import acsylla
import pytest
import pytest_asyncio

from tidebook.core.errors import Fenced
from tidebook.core.event import Event
from tidebook.core.segments import head_segment
from tidebook.replication.ticks import tick
from tidebook.tags.sql_offsets import TABLE, SqlOffsets
from tidebook.tags.subscription import SHARES, Subscription
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

pytestmark = pytest.mark.cassandra

KEYSPACE = "tag_groups"
LEASE_S = 1.5
CASE_TIMEOUT_S = 60


@pytest_asyncio.fixture
async def book(tmp_path: Path, cassandra_address: str) -> AsyncIterator[Book]:
    sections = {
        "store": Section(f"cassandra://{cassandra_address}/{KEYSPACE}"),
        "journal": Section(None, {"partitions": 1}),
    }
    async with Book(Settings(tmp_path / "book", sections)) as book:
        yield book


@pytest.fixture
def topic() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"


async def append(book: Book, topic: str, payloads: range) -> None:
    for n in payloads:
        await book.journal(topic).append(f"j-{n % 40}", [Event(n, tags={f"tag-{topic}"})])
    await replicate(book.log, book.store, topic)
    await tick(book.log, book.store, [topic])
    await replicate(book.log, book.store, topic)


class Member:
    """A group member that works in the background until it is stopped or killed."""

    def __init__(self, book: Book, topic: str, done: list[int]) -> None:
        self.events: Subscription = book.tags.subscribe(f"tag-{topic}", "mail", topics=[topic], lease_s=LEASE_S)
        self.mine: list[int] = []
        self._done = done
        self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        await self.events.__aenter__()
        async for event in self.events:
            await asyncio.sleep(0.002)
            try:
                await self.events.commit(event)
            except Fenced:
                continue
            self.mine.append(event.payload)
            self._done.append(event.payload)

    async def kill(self) -> None:
        """Stop the member and its heartbeats without leaving the group."""
        for task in (self._task, self.events._renewal):
            assert task is not None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.events.__aexit__(None, None, None)


async def until(done: list[int], payloads: range) -> None:
    async with asyncio.timeout(CASE_TIMEOUT_S):
        while not set(payloads) <= set(done):  # noqa: ASYNC110  there is no event to await
            await asyncio.sleep(0.02)


async def test_members_join_leave_and_are_killed_and_every_event_is_committed(book: Book, topic: str) -> None:
    done: list[int] = []
    await append(book, topic, range(60))
    first = Member(book, topic, done)
    await until(done, range(60))
    second = Member(book, topic, done)
    async with asyncio.timeout(CASE_TIMEOUT_S):
        while len(second.events.shares) < SHARES / 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await append(book, topic, range(60, 120))
    await until(done, range(120))
    assert first.mine
    assert second.mine
    await first.kill()
    await append(book, topic, range(120, 180))
    await until(done, range(180))
    third = Member(book, topic, done)
    await second.leave()
    await append(book, topic, range(180, 220))
    await until(done, range(220))
    assert len(third.events.shares) == SHARES
    await third.leave()
    assert sorted(done) == list(range(220)), "an event was lost, or processed twice although no member was paused"


async def test_a_group_with_external_offsets_counts_once_on_cassandra(book: Book, topic: str, tmp_path: Path) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "app.db")

    app = connect()
    app.execute(TABLE)
    app.execute("CREATE TABLE seen (payload INTEGER)")
    app.commit()
    tag = f"tag-{topic}"
    offsets = SqlOffsets(tag, "sums", connect)
    for count in (20, 40):
        await append(book, topic, range(count - 20, count))
        for stop in (7, 1000):
            async with book.tags.subscribe(tag, "sums", topics=[topic], follow=False, offsets=offsets) as events:
                n = 0
                async for event in events:
                    n += 1
                    if offsets.advance(app, event):
                        app.execute("INSERT INTO seen VALUES (?)", (event.payload,))
                    if n == stop:
                        app.rollback()  # a crash before the commit
                        break
                    app.commit()
    assert sorted(payload for (payload,) in app.execute("SELECT payload FROM seen")) == list(range(40))
    app.close()


async def test_progress_rows_count_the_events_of_each_journal_and_tag(
    book: Book, topic: str, cassandra_address: str
) -> None:
    tag = f"tag-{topic}"
    for n in range(3):
        await book.journal(topic).append("a", [Event(n, tags={tag}), Event(n)])
    await book.journal(topic).append("gone", [Event(0, tags={tag})])
    await replicate(book.log, book.store, topic)
    await book.journal(topic).purge("gone")
    await replicate(book.log, book.store, topic)
    config = await book.journal(topic).create()
    host, port = cassandra_address.split(":")
    cluster = acsylla.create_cluster([host], port=int(port), log_level="disabled")
    session = await cluster.create_session(keyspace=KEYSPACE)
    found = {}
    for id in ("a", "gone"):
        where = f"topic = '{topic}' AND segment = {head_segment(id, config.segments)} AND id = '{id}'"
        query = f"SELECT tag, tag_seq_nr, seq_nr, epoch FROM tag_views_progress WHERE {where}"
        found[id] = [row.as_tuple() for row in await session.execute(acsylla.create_statement(query))]
    await session.close()
    assert found == {"a": [(tag, 3, 5, 1)], "gone": []}
