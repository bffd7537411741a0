"""Members of a group at work: leases last while they work, what was read is not read again, races are borne."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tidebook import Event, OutcomeUnknown
from tidebook.core.clock import RandomIds
from tidebook.core.replication import TagRow
from tidebook.tags.shares import SHARES, decode_group
from tidebook.tags.sql_offsets import TABLE, SqlOffsets
from tidebook.tags.subscription import Subscription
from tidebook.tags.tags import Tags
from tidebook.tags.ticks import FOLLOWED_SETTING, tick
from tidebook.testing.clock import ManualClock
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

LEASE_S = 0.3


class Watched:
    """A store that counts the tag rows it gives, and does not tell what came of some settings."""

    def __init__(self, book: Book) -> None:
        self._store = book.store
        self.rows = 0
        self.untold: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def tag_rows(self, *given: Any, **named: Any) -> Sequence[TagRow]:
        rows = await self._store.tag_rows(*given, **named)
        self.rows += len(rows)
        return rows

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        done = await self._store.set_setting(name, value, expected=expected)
        if name in self.untold:
            self.untold.discard(name)
            raise OutcomeUnknown("the store did not answer")
        return done


@pytest_asyncio.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with Book(Settings(tmp_path / "book", {"journal": Section(None, {"partitions": 1})})) as book:
        yield book


@pytest.fixture
def store(book: Book) -> Watched:
    return Watched(book)


@pytest.fixture
def tags(book: Book, store: Watched) -> Tags:
    return Tags(store=store, clock=book.clock, ids=RandomIds())


async def append(book: Book, topic: str, payloads: Iterable[int], *, journals: int = 20) -> None:
    for n in payloads:
        await book.journal(topic).append(f"j-{n % journals}", [Event(n, tags={"paid"})])
    topics = await book.store.topics()
    for each in topics:
        await replicate(book.log, book.store, each)
    await tick(book.log, book.store, topics)
    for each in topics:
        await replicate(book.log, book.store, each)


async def all_of(events: Subscription) -> list[int]:
    return [event.payload async for event in events]


async def test_a_lease_lasts_while_an_event_is_worked_on(book: Book, tags: Tags) -> None:
    await append(book, "t", range(3))
    async with tags.subscribe("paid", "mail", follow=False, lease_s=LEASE_S) as first:
        async for event in first:
            await asyncio.sleep(LEASE_S * 2)
            async with tags.subscribe("paid", "mail", follow=False, lease_s=LEASE_S) as second:
                assert second.shares == frozenset()
            await first.commit(event)
            break


async def test_a_member_that_asks_for_nothing_for_long_is_given_up(
    book: Book, tags: Tags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.tags.subscription.HANDLING_MAX_S", 0.0)
    await append(book, "t", range(3))
    async with tags.subscribe("paid", "mail", follow=False, lease_s=LEASE_S):
        await asyncio.sleep(LEASE_S * 2)
        async with tags.subscribe("paid", "mail", follow=False, lease_s=LEASE_S) as second:
            assert len(second.shares) == SHARES


async def test_a_member_does_not_read_again_what_other_topics_hold(book: Book, store: Watched, tags: Tags) -> None:
    await append(book, "other", range(30))
    await append(book, "mine", [100])
    await append(book, "other", range(30, 60))
    polls = 0
    async with tags.subscribe("paid", "mail", topics=["mine"], lease_s=LEASE_S) as events:
        wait_any = book.store.wait_any

        async def woken(**named: Any) -> int:
            nonlocal polls
            polls += 1
            if polls == 5:
                raise TimeoutError
            return await wait_any(timeout_s=0.01)

        store.wait_any = woken  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            assert await all_of(events) == [100]
    assert store.rows == 61
    async with tags.subscribe("paid", "mail", topics=["mine"], follow=False, lease_s=LEASE_S) as events:
        assert await all_of(events) == [100], "it was not committed"


async def test_a_commit_does_not_move_a_group_back(book: Book, tags: Tags) -> None:
    await append(book, "t", range(20), journals=1)
    async with tags.subscribe("paid", "mail", follow=False) as events:
        given = [event async for event in events]
        await events.commit(given[-1])
        await events.commit(given[0])
    async with tags.subscribe("paid", "mail", follow=False) as events:
        assert await all_of(events) == []


async def test_as_many_members_as_there_are_shares_join_and_leave_at_once(book: Book, tags: Tags) -> None:
    members = [tags.subscribe("paid", "mail", follow=False) for _ in range(SHARES)]
    await asyncio.gather(*(member.__aenter__() for member in members))
    assert len(decode_group(await book.store.setting("tags/group/mail/paid")).members) == SHARES
    await asyncio.gather(*(member.__aexit__(None, None, None) for member in members))
    assert decode_group(await book.store.setting("tags/group/mail/paid")).members == {}


async def test_a_group_goes_on_where_the_store_did_not_tell_what_came_of_a_change(
    book: Book, store: Watched, tags: Tags
) -> None:
    await append(book, "t", range(20))
    seen = []
    async with tags.subscribe("paid", "mail", follow=False) as events:
        async for event in events:
            store.untold = {"tags/group/mail/paid"}
            await events.commit(event)
            seen.append(event.payload)
        store.untold = {"tags/group/mail/paid"}
    assert sorted(seen) == list(range(20))
    async with tags.subscribe("paid", "mail", follow=False) as events:
        assert len(events.shares) == SHARES
        assert await all_of(events) == []


async def test_a_follower_goes_on_where_the_store_cannot_take_its_hint(book: Book, store: Watched, tags: Tags) -> None:
    await append(book, "t", [7])
    store.untold = {FOLLOWED_SETTING}
    async for event in tags.read("paid", follow=True):
        assert event.payload == 7
        break
    assert store.untold == set()


async def test_a_member_whose_clock_is_ahead_takes_nothing_from_one_that_renews(book: Book) -> None:
    await append(book, "t", range(20))
    clock, ahead = ManualClock(), ManualClock()
    ahead.advance(3_600_000)
    first = Tags(store=book.store, clock=clock, ids=RandomIds()).subscribe("paid", "mail")
    second = Tags(store=book.store, clock=ahead, ids=RandomIds()).subscribe("paid", "mail")
    async with first, second:
        assert len(second.shares) == 0
        for _ in range(30):
            for each in (clock, ahead):
                each.advance(2000)
            for member in (first, second):
                await member._renew()
            assert not first.shares & second.shares
        assert len(first.shares) == len(second.shares) == SHARES / 2
        terms = [share.term for share in decode_group(await book.store.setting("tags/group/mail/paid")).shares]
        assert max(terms) <= 2
        for each in (clock, ahead):
            each.advance(31_000)
        await second._renew()
        assert len(second.shares) == SHARES, "one that renews no more is given up"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "app.db") as connection:
        connection.execute(TABLE)
    return tmp_path / "app.db"


async def handle(tags: Tags, offsets: SqlOffsets, database: Path) -> list[int]:
    done = []
    connection = sqlite3.connect(database)
    async with tags.subscribe("paid", "sums", follow=False, offsets=offsets) as events:
        async for event in events:
            if offsets.advance(connection, event):
                done.append(event.payload)
            connection.commit()
    connection.close()
    return done


async def test_a_group_that_keeps_its_own_offsets_does_not_read_the_tag_again_when_it_restarts(
    book: Book, store: Watched, tags: Tags, database: Path
) -> None:
    offsets = SqlOffsets("paid", "sums", lambda: sqlite3.connect(database))
    await append(book, "t", range(30), journals=3)
    assert await handle(tags, offsets, database) == list(range(30))
    store.rows = 0
    assert await handle(tags, offsets, database) == []
    assert store.rows == 0
    await append(book, "t", [30, 31])
    assert await handle(tags, offsets, database) == [30, 31]
    assert store.rows == 2


async def test_a_group_whose_own_offsets_are_restored_from_earlier_gets_its_events_again(
    book: Book, tags: Tags, database: Path
) -> None:
    offsets = SqlOffsets("paid", "sums", lambda: sqlite3.connect(database))
    await append(book, "t", range(10), journals=3)
    await handle(tags, offsets, database)
    kept = database.read_bytes()
    await append(book, "t", range(10, 30))
    assert len(await handle(tags, offsets, database)) == 20
    database.write_bytes(kept)
    assert await handle(tags, offsets, database) == list(range(10, 30))
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM tidebook_tag_offset")
    assert await handle(tags, offsets, database) == list(range(30))
