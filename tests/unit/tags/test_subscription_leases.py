"""Members of a group while they handle events: leases, offsets of idle shares, and races."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tidebook.core.errors import InvalidInput, OutcomeUnknown
from tidebook.core.event import Event
from tidebook.core.replication_plan import TagRow
from tidebook.replication.ticks import tick
from tidebook.runtime.clock import RandomIds
from tidebook.tags.horizon import FOLLOWED_SETTING
from tidebook.tags.sql_offsets import TABLE, SqlOffsets
from tidebook.tags.subscription import SHARES, Subscription, decode_group
from tidebook.tags.tags import Tags
from tidebook.testing.clock import ManualClock
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

LEASE_S = 0.3


class Watched:
    """A store that counts the tag rows it returns, and can hide the outcome of a changed setting."""

    def __init__(self, book: Book) -> None:
        self._store = book.store
        self.rows = 0
        self.unacknowledged: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def tag_rows(self, *given: Any, **named: Any) -> Sequence[TagRow]:
        rows = await self._store.tag_rows(*given, **named)
        self.rows += len(rows)
        return rows

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        done = await self._store.set_setting(name, value, expected=expected)
        if name in self.unacknowledged:
            self.unacknowledged.discard(name)
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


async def all_records(events: Subscription) -> list[int]:
    return [event.payload async for event in events]


async def test_a_lease_lasts_while_an_event_is_handled(book: Book, tags: Tags) -> None:
    await append(book, "t", range(3))
    async with tags.subscribe("paid", "mail", follow=False, lease_s=LEASE_S) as first:
        async for event in first:
            await asyncio.sleep(LEASE_S * 2)
            async with tags.subscribe("paid", "mail", follow=False, lease_s=LEASE_S) as second:
                assert second.shares == frozenset()
            await first.commit(event)
            break


async def test_the_lease_of_a_member_that_requests_no_event_for_long_expires(
    book: Book, tags: Tags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.tags.subscription.HANDLING_MAX_S", 0.0)
    await append(book, "t", range(3))
    async with tags.subscribe("paid", "mail", follow=False, lease_s=LEASE_S):
        await asyncio.sleep(LEASE_S * 2)
        async with tags.subscribe("paid", "mail", follow=False, lease_s=LEASE_S) as second:
            assert len(second.shares) == SHARES


async def test_a_member_does_not_read_rows_of_other_topics_again(book: Book, store: Watched, tags: Tags) -> None:
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
            assert await all_records(events) == [100]
    assert store.rows == 61
    async with tags.subscribe("paid", "mail", topics=["mine"], follow=False, lease_s=LEASE_S) as events:
        assert await all_records(events) == [100], "the event was not committed"


async def test_a_commit_does_not_move_a_group_back(book: Book, tags: Tags) -> None:
    await append(book, "t", range(20), journals=1)
    async with tags.subscribe("paid", "mail", follow=False) as events:
        given = [event async for event in events]
        await events.commit(given[-1])
        await events.commit(given[0])
    async with tags.subscribe("paid", "mail", follow=False) as events:
        assert await all_records(events) == []


async def test_as_many_members_as_there_are_shares_join_and_leave_concurrently(book: Book, tags: Tags) -> None:
    members = [tags.subscribe("paid", "mail", follow=False) for _ in range(SHARES)]
    await asyncio.gather(*(member.__aenter__() for member in members))
    assert len(decode_group(await book.store.setting("tags/group/mail/paid")).members) == SHARES
    await asyncio.gather(*(member.__aexit__(None, None, None) for member in members))
    assert decode_group(await book.store.setting("tags/group/mail/paid")).members == {}


async def test_a_group_survives_a_change_with_unknown_outcome(book: Book, store: Watched, tags: Tags) -> None:
    await append(book, "t", range(20))
    seen = []
    async with tags.subscribe("paid", "mail", follow=False) as events:
        async for event in events:
            store.unacknowledged = {"tags/group/mail/paid"}
            await events.commit(event)
            seen.append(event.payload)
        store.unacknowledged = {"tags/group/mail/paid"}
    assert sorted(seen) == list(range(20))
    async with tags.subscribe("paid", "mail", follow=False) as events:
        assert len(events.shares) == SHARES
        assert await all_records(events) == []


async def test_a_live_stream_survives_a_store_that_rejects_its_hint(book: Book, store: Watched, tags: Tags) -> None:
    await append(book, "t", [7])
    store.unacknowledged = {FOLLOWED_SETTING}
    async for event in tags.read("paid", follow=True):
        assert event.payload == 7
        break
    assert store.unacknowledged == set()


async def test_a_member_whose_clock_is_ahead_takes_no_share_from_one_that_renews(book: Book) -> None:
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
        assert len(second.shares) == SHARES, "a share whose owner no longer renews is taken"


async def test_a_member_whose_clock_is_set_back_releases_shares_that_others_took(book: Book) -> None:
    await append(book, "t", range(40))
    clock, others = ManualClock(), ManualClock()
    first = Tags(store=book.store, clock=clock, ids=RandomIds()).subscribe("paid", "mail", follow=False)
    second = Tags(store=book.store, clock=others, ids=RandomIds()).subscribe("paid", "mail", follow=False)
    async with first:
        events = aiter(first)
        seen = [(await anext(events)).payload]
        clock.set(clock.now_ms() - 3_600_000)
        for each in (clock, others):
            each.advance(31_000)  # its lease expires while it handles the first event
        async with second:
            assert len(second.shares) == SHARES
            taken = [event.payload async for event in second]
            assert len(taken) == 40
            seen += [event.payload async for event in events]
        assert len(seen) == 1, "shares of the second member are not delivered to the first"


async def test_a_wall_clock_that_is_set_back_does_not_keep_a_member_from_renewing(book: Book) -> None:
    await append(book, "t", range(4))
    clock = ManualClock()
    member = Tags(store=book.store, clock=clock, ids=RandomIds()).subscribe("paid", "mail", follow=False)
    async with member:
        before = await book.store.setting("tags/group/mail/paid")
        clock.set(clock.now_ms() - 3_600_000)
        clock.advance(5_000)
        async for _ in member:
            pass
        assert await book.store.setting("tags/group/mail/paid") != before


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


async def test_a_restarted_group_with_external_offsets_does_not_read_the_tag_again(
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


async def test_shares_whose_external_offsets_cannot_be_read_are_released_unchanged(
    book: Book, tags: Tags, database: Path
) -> None:
    def unreadable(shares: Iterable[int]) -> Mapping[int, str]:
        raise sqlite3.OperationalError("unable to open database file")

    async def take_over() -> None:
        async with tags.subscribe("paid", "sums", follow=False, offsets=unreadable) as member:
            assert await all_records(member) == [], (
                "the member has read past the events of the shares that it takes next"
            )
            await owner.__aexit__(None, None, None)
            await member._renew()

    offsets = SqlOffsets("paid", "sums", lambda: sqlite3.connect(database))
    await append(book, "t", range(10), journals=3)
    owner = tags.subscribe("paid", "sums", follow=False, offsets=offsets)
    await owner.__aenter__()
    with pytest.raises(sqlite3.OperationalError):
        await take_over()
    assert await handle(tags, offsets, database) == list(range(10))


async def test_a_group_whose_external_offsets_are_restored_gets_its_events_again(
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


@pytest.mark.parametrize("kind", ["session", "connection"])
async def test_offsets_are_stored_through_sqlalchemy(book: Book, tags: Tags, database: Path, kind: str) -> None:
    engine = create_engine(f"sqlite:///{database}")
    opened: Any = Session if kind == "session" else (lambda of: of.connect())
    offsets = SqlOffsets("paid", "sums", lambda: opened(engine))
    await append(book, "t", range(12), journals=3)

    async def handle_all(*, keep: bool) -> list[int]:
        done = []
        async with tags.subscribe("paid", "sums", follow=False, offsets=offsets) as events:
            async for event in events:
                with opened(engine) as transaction:
                    if offsets.advance(transaction, event):
                        done.append(event.payload)
                    if keep:
                        transaction.commit()
        return done

    assert await handle_all(keep=False) == list(range(12))
    assert await handle_all(keep=True) == list(range(12)), "events that were rolled back are delivered again"
    assert await handle_all(keep=True) == []
    engine.dispose()


async def test_an_async_session_must_use_run_sync(book: Book, tags: Tags, database: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{database}")
    offsets = SqlOffsets("paid", "sums", lambda: sqlite3.connect(database))
    await append(book, "t", range(2))
    async with tags.subscribe("paid", "sums", follow=False, offsets=offsets) as events:
        event = await anext(aiter(events))
        async with AsyncSession(engine) as session:
            with pytest.raises(InvalidInput, match="run_sync"):
                offsets.advance(session, event)
            assert await session.run_sync(lambda each: offsets.advance(each, event))
            await session.commit()
        async with AsyncSession(engine) as session:
            assert not await session.run_sync(lambda each: offsets.advance(each, event))
    await engine.dispose()
