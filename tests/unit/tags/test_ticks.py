"""Ticks bring what is replicated below the horizon, and come only where they are of use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

import tidebook
from tidebook import Event
from tidebook.pipeline.ticking import settle
from tidebook.tags.ticks import FOLLOWED_EVERY_S, LOOK_EVERY_S, Following, Ticker
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book


class Seconds:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest_asyncio.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with tidebook.open(tmp_path / "book") as book:
        yield book


async def records(book: Book) -> int:
    facts = await book.store.facts("orders")
    assert facts is not None
    return sum([await book.log.end("orders", partition) for partition in range(facts.partitions)])


async def payloads(book: Book) -> list[object]:
    return [event.payload async for event in book.tags.read("paid")]


async def test_after_settling_all_that_was_replicated_is_in_the_stream(book: Book) -> None:
    for n in range(5):
        await book.journal("orders").append(f"o-{n}", [Event(n, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await settle(book)
    assert sorted(await payloads(book)) == [0, 1, 2, 3, 4]  # type: ignore[type-var]


async def test_a_book_without_tags_is_not_ticked(book: Book) -> None:
    await book.journal("orders").append("o-1", [Event(1)])
    await replicate(book.log, book.store, "orders")
    before = await records(book)
    assert await settle(book) == 0
    await Ticker(book.log, book.store).step()
    assert await records(book) == before


async def test_a_ticker_brings_events_below_the_horizon_and_rests_when_nothing_comes(book: Book) -> None:
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    assert await ticker.step() == LOOK_EVERY_S
    clock.now_s += 10
    ticked = await records(book)
    await ticker.step()
    assert await records(book) == ticked, "the ticks before are not replicated yet"
    await replicate(book.log, book.store, "orders")
    assert await payloads(book) == [1]
    clock.now_s += 10
    await ticker.step()
    assert await records(book) == ticked, "nothing came behind the ticks"
    await book.journal("orders").append("o-1", [Event(2, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    clock.now_s += 10
    await ticker.step()
    await replicate(book.log, book.store, "orders")
    assert await payloads(book) == [1, 2]


async def test_ticks_come_often_while_somebody_follows_and_seldom_after(book: Book) -> None:
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    assert await ticker.step() == LOOK_EVERY_S
    await Following(book.store, book.clock).renew()
    clock.now_s += 1
    assert await ticker.step() == FOLLOWED_EVERY_S
    clock.now_s += 11
    assert await ticker.step() == LOOK_EVERY_S


async def test_events_that_came_just_before_a_tick_are_brought_below_the_horizon_by_the_next(book: Book) -> None:
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await book.journal("orders").append("o-1", [Event(2, tags={"paid"})])
    for _ in range(3):
        clock.now_s += 10
        await ticker.step()
        await replicate(book.log, book.store, "orders")
    assert await payloads(book) == [1, 2]
    before = await records(book)
    clock.now_s += 10
    await ticker.step()
    assert await records(book) == before


async def test_a_topic_that_is_stuck_does_not_keep_others_from_being_ticked(book: Book) -> None:
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    await book.journal("stuck").append("s", [Event(0)])
    for n in range(3):
        await book.journal("orders").append("o-1", [Event(n, tags={"paid"})])
        await replicate(book.log, book.store, "orders")
        clock.now_s += 10
        await ticker.step()
        await replicate(book.log, book.store, "orders")
        found = [event.payload async for event in book.tags.read("paid", topics=["orders"])]
        assert found == list(range(n + 1))
    facts = await book.store.facts("stuck")
    assert facts is not None
    ends = [await book.log.end("stuck", partition) for partition in range(facts.partitions)]
    assert sum(ends) <= 1 + 2 * facts.partitions, "its ticks do not pile up"
