"""Members of a group share journals: each event goes to one member; uncommitted events are delivered again."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tidebook.core.errors import Fenced, InvalidInput
from tidebook.core.event import Event
from tidebook.core.replication_plan import TagPosition
from tidebook.replication.ticks import tick
from tidebook.runtime.clock import RandomIds
from tidebook.tags.horizon import FOLLOWED_SETTING
from tidebook.tags.sql_offsets import TABLE, SqlOffsets
from tidebook.tags.subscription import (
    SHARES,
    GroupAssignment,
    decode_group,
    member_removed,
    owned_shares,
    rebalanced,
    share_of,
)
from tidebook.tags.tags import Tags
from tidebook.testing.clock import ManualClock
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["renew", "leave"]), st.integers(0, 12)), max_size=40)
)
def test_a_share_has_one_owner_and_every_live_member_finally_gets_its_shares(
    history: list[tuple[str, str, int]],
) -> None:
    group, now_ms = GroupAssignment(), 0
    for member, act, passed_ms in history:
        now_ms += passed_ms
        before = group
        group = (
            rebalanced(group, member, now_ms=now_ms, lease_ms=10) if act == "renew" else member_removed(group, member)
        )
        for old, new in zip(before.shares, group.shares, strict=True):
            if new.owner != old.owner and new.owner is not None:
                assert new.term == old.term + 1
                assert old.owner is None or old.owner not in group.members
    for _ in range(2):
        for member in "abc":
            group = rebalanced(group, member, now_ms=now_ms + 11, lease_ms=10)
    assert {member: len(owned_shares(group, member)) for member in "abc"} == {"a": 22, "b": 21, "c": 21}
    assert decode_group(msgspec.json.encode(group).decode()) == group
    assert len(group.shares) == SHARES


class World:
    def __init__(self, book: Book, clock: ManualClock) -> None:
        self.book, self.clock = book, clock
        self.tags = Tags(store=book.store, clock=clock, ids=RandomIds())

    async def append(self, *payloads: int) -> None:
        for n in payloads:
            await self.book.journal("t").append(f"j-{n % 20}", [Event(n, tags={"paid"})])
        await replicate(self.book.log, self.book.store, "t")
        await tick(self.book.log, self.book.store, ["t"])
        await replicate(self.book.log, self.book.store, "t")


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": 2})})) as book:
        yield World(book, ManualClock())


async def test_a_group_continues_after_its_committed_offset(world: World) -> None:
    await world.append(*range(40))
    async with world.tags.subscribe("paid", "mail", follow=False) as events:
        seen = []
        async for event in events:
            seen.append(event.payload)
            if event.payload < 30:
                await events.commit(event)
    assert sorted(seen) == list(range(40))
    async with world.tags.subscribe("paid", "mail", follow=False) as events:
        again = [event.payload async for event in events]
    assert set(range(30, 40)) <= set(again) <= set(range(20, 40))
    assert len(again) == len(set(again))
    async with world.tags.subscribe("paid", "other", follow=False) as events:
        assert len([event async for event in events]) == 40


async def test_two_members_share_the_journals_and_a_late_commit_is_fenced(world: World) -> None:
    await world.append(*range(40))
    first = world.tags.subscribe("paid", "mail", follow=False)
    second = world.tags.subscribe("paid", "mail", follow=False)
    async with first:
        held = [event async for event in first]
        world.clock.advance(31_000)  # paused, and presumed dead
        async with second:
            assert len(second.shares) == SHARES
            taken = [event async for event in second]
            assert [event.payload for event in taken] == [event.payload for event in held]
            with pytest.raises(Fenced):
                await first.commit(held[0])
            await second.commit(taken[0])


async def test_a_restarted_group_does_not_read_committed_events_again(world: World) -> None:
    """This holds although most shares have no journal, and so never an event to commit."""
    for n in range(12):
        await world.book.journal("t").append(f"j-{n % 3}", [Event(n, tags={"paid"})])
    await world.append()
    async with world.tags.subscribe("paid", "mail", follow=False) as events:
        async for event in events:
            await events.commit(event)
    begun: list[TagPosition | None] = []
    again = world.tags.subscribe("paid", "mail", follow=False)
    read = again._read
    again._read = lambda place: (begun.append(place), read(place))[1]  # type: ignore[func-returns-value]
    async with again:
        assert [event async for event in again] == []
    assert begun[0] is not None


@given(done=st.lists(st.integers(0, 39), max_size=10), stop=st.integers(0, 40))
@hypothesis_settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_delivered_but_uncommitted_events_are_delivered_again(tmp_path: Path, done: list[int], stop: int) -> None:
    async def go() -> None:
        folder = tmp_path / uuid.uuid4().hex
        async with Book(Settings(folder, {"journal": Section(None, {"partitions": 2})})) as book:
            world = World(book, ManualClock())
            await world.append(*range(40))
            committed: dict[int, int] = {}
            seen: list[int] = []
            async with world.tags.subscribe("paid", "mail", follow=False) as events:
                async for event in events:
                    if len(seen) == stop:
                        break
                    seen.append(event.payload)
                    if event.payload in done:
                        await events.commit(event)
                        committed[share_of(event.topic, event.id)] = len(seen)
            of_share = {n: share_of("t", f"j-{n % 20}") for n in range(40)}
            uncommitted = {n for at, n in enumerate(seen) if at >= committed.get(of_share[n], 0)}
            async with world.tags.subscribe("paid", "mail", follow=False) as events:
                again = [event.payload async for event in events]
            assert set(again) == uncommitted | (set(range(40)) - set(seen))
            assert len(again) == len(set(again))

    asyncio.run(go())


async def test_a_live_member_asks_for_frequent_ticks(world: World) -> None:
    await world.append(1)
    async with world.tags.subscribe("paid", "mail", follow=False) as events:
        assert [event.payload async for event in events] == [1]
    assert await world.book.store.setting(FOLLOWED_SETTING) is None, "a member that only catches up needs no ticks"
    async with world.tags.subscribe("paid", "live") as events:
        async for event in events:
            assert event.payload == 1
            break
    assert await world.book.store.setting(FOLLOWED_SETTING) is not None


async def test_a_member_with_a_short_lease_is_alive_while_it_reads(world: World) -> None:
    await world.append(*range(10))
    async with world.tags.subscribe("paid", "mail", follow=False, lease_s=1.5) as events:
        async for _ in events:
            group = decode_group(await world.book.store.setting("tags/group/mail/paid"))
            assert min(group.members.values()) > world.clock.now_ms()
            world.clock.advance(600)
    with pytest.raises(InvalidInput):
        world.tags.subscribe("paid", "mail", lease_s=0)


async def test_groups_and_tags_with_slashes_are_not_mixed_up(world: World) -> None:
    await world.append(1)
    await world.book.journal("t").append("j-1", [Event("other", tags={"b/paid"})])
    await world.append()
    async with world.tags.subscribe("b/paid", "a", follow=False) as events:
        async for event in events:
            await events.commit(event)
    async with world.tags.subscribe("paid", "a/b", follow=False) as events:
        assert [event.payload async for event in events] == [1]


async def test_events_are_counted_once_in_a_table_that_holds_the_offsets_too(world: World, tmp_path: Path) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "app.db")

    app = connect()
    app.execute(TABLE)
    app.execute("CREATE TABLE seen (payload INTEGER)")
    app.commit()
    offsets = SqlOffsets("paid", "sums", connect)
    for round in range(3):
        await world.append(*range(round * 20, round * 20 + 20))
        async with world.tags.subscribe("paid", "sums", follow=False, offsets=offsets) as events:
            n = 0
            async for event in events:
                n += 1
                if offsets.advance(app, event):
                    app.execute("INSERT INTO seen VALUES (?)", (event.payload,))
                if n == 7 and round < 2:
                    app.rollback()  # a crash before the commit
                    break
                app.commit()
                assert not offsets.advance(app, event), "a second delivery is recognized"
    rows = sorted(payload for (payload,) in app.execute("SELECT payload FROM seen"))
    assert rows == list(range(60))
    app.close()
