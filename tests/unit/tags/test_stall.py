"""A live stream reports that replication makes no progress: the horizon, its age and the remedy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.errors import Unavailable
from tidebook.core.event import Event
from tidebook.replication.ticks import tick
from tidebook.tags import horizon
from tidebook.tags.horizon import STALL_MS, HorizonStatus
from tidebook.tags.settings import TagSettings
from tidebook.tags.subscription import Subscription
from tidebook.tags.tags import Tags
from tidebook.testing.clock import ManualClock
from tidebook.testing.faults import Faults
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.feed import Feed
from tidebook.wiring.settings import Section, Settings

SOON = TagSettings(poll_s=0.005)


class Reports:
    """Collects the reports of a stream, and lets a test wait for one."""

    def __init__(self) -> None:
        self.seen: list[HorizonStatus] = []
        self._news = asyncio.Event()

    def __call__(self, status: HorizonStatus) -> None:
        self.seen.append(status)
        self._news.set()

    async def next(self) -> HorizonStatus:
        async with asyncio.timeout(30):
            await self._news.wait()
        self._news.clear()
        return self.seen[-1]


@pytest.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": 2})})) as opened:
        yield opened


@pytest.fixture
def clock(book: Book) -> ManualClock:
    return ManualClock(book.clock.now_ms())


def streams(book: Book, clock: ManualClock, settings: TagSettings = SOON) -> Tags:
    return Tags(store=book.store, clock=clock, settings=settings, log=book.log)


def is_waiting(stream: Subscription | Feed) -> bool:
    return stream.waiting is not None


async def passes(clock: ManualClock, tags: Tags, ms: int) -> None:
    """Advance the time in steps so small that a stream checks the horizon in each of them."""
    for _ in range(ms // 1000):
        seen, read = asyncio.Event(), tags._horizons.read

        async def noted(topics: Any = None, *, seen: asyncio.Event = seen, read: Any = read) -> Any:
            seen.set()
            return await read(topics)

        tags._horizons.read = noted  # type: ignore[method-assign]
        clock.advance(1000)
        async with asyncio.timeout(30):
            await seen.wait()
        tags._horizons.read = read  # type: ignore[method-assign]


@pytest.mark.parametrize("consistency", ["horizon", "delay"])
async def test_following_a_tag_while_nothing_replicates_is_reported(
    book: Book, clock: ManualClock, consistency: Any
) -> None:
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    reports, tags = Reports(), streams(book, clock)
    stream = tags.read("paid", follow=True, consistency=consistency, on_waiting=reports)
    first = asyncio.ensure_future(anext(stream))
    await passes(clock, tags, 4_000)
    assert reports.seen == []
    clock.advance(STALL_MS)
    status = await reports.next()
    assert (status.horizon, status.topic, status.lag) == (None, "orders", 1)
    assert status.stalled_s >= STALL_MS / 1000
    for part in ("never replicated", "tidebook pipeline replicate", "tidebook up"):
        assert part in status.describe()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_stream_with_nothing_to_replicate_reports_nothing(book: Book, clock: ManualClock) -> None:
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    reports, tags = Reports(), streams(book, clock)
    first = asyncio.ensure_future(anext(tags.read("paid", follow=True, on_waiting=reports)))
    await passes(clock, tags, 20_000)
    assert reports.seen == []
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_replication_that_makes_progress_is_no_stall(book: Book, clock: ManualClock) -> None:
    """The other partition is idle and holds the horizon back, and there is a new record at every check."""
    await book.journal("orders").append("o-1", [Event(0, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    reports, tags = Reports(), streams(book, clock)
    first = asyncio.ensure_future(anext(tags.read("paid", follow=True, on_waiting=reports)))
    for n in range(12):
        await book.journal("orders").append("o-1", [Event(n)])
        await passes(clock, tags, 1_000)
        await passes(clock, tags, 1_000)
        await replicate(book.log, book.store, "orders")
    assert reports.seen == []
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_log_that_does_not_respond_does_not_delay_a_stream(book: Book, clock: ManualClock) -> None:
    await book.journal("orders").append("o-1", [Event(0, tags={"paid"})])
    faults = Faults()
    faults.fail("end", Unavailable("the log is down"), times=None)
    tags = Tags(store=book.store, clock=clock, settings=SOON, log=faults.around(book.log))
    assert (await tags.status()).lag is None
    reports = Reports()
    first = asyncio.ensure_future(anext(tags.read("paid", follow=True, on_waiting=reports)))
    await passes(clock, tags, 60_000)
    assert reports.seen == []
    assert faults.calls["end"] <= 10, "the log is not queried for a while"
    await replicate(book.log, book.store, "orders")
    await tick(book.log, book.store, ["orders"])
    await replicate(book.log, book.store, "orders")
    async with asyncio.timeout(30):
        assert (await first).payload == 0


async def test_a_horizon_that_moves_again_ends_the_stall(book: Book, clock: ManualClock) -> None:
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await book.journal("orders").append("o-1", [Event(2, tags={"paid"})])
    reports, tags = Reports(), streams(book, clock)
    async with tags.subscribe("paid", "mail", lease_s=0.05, on_waiting=reports) as member:
        first = asyncio.ensure_future(anext(aiter(member)))
        await passes(clock, tags, 10_000)
        status = await reports.next()
        assert is_waiting(member)
        assert (status.lag, status.remedy is not None) == (1, True)
        await replicate(book.log, book.store, "orders")
        await book.journal("orders").append("o-2", [Event(3)])
        await replicate(book.log, book.store, "orders")
        await passes(clock, tags, 4_000)
        assert len(reports.seen) == 1
        assert not is_waiting(member)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_a_feed_reports_what_it_waits_for_until_it_is_replicated(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    tags, logged = streams(book, clock), asyncio.Queue[str]()
    monkeypatch.setattr(horizon.LOGGER, "warning", lambda text, *config: logged.put_nowait(text % config))
    feed = Feed(tags, "paid", book.queue("mail"))
    assert not is_waiting(feed)
    running = asyncio.ensure_future(feed.run())
    await passes(clock, tags, 7_000)
    async with asyncio.timeout(30):
        text = await logged.get()
    assert "group 'queue/mail' of tag 'paid'" in text
    waiting = feed.waiting
    assert waiting is not None
    assert (waiting.topic, waiting.lag) == ("orders", 1)
    assert waiting.stalled_s >= STALL_MS / 1000
    assert "tidebook pipeline replicate" in waiting.describe()
    await replicate(book.log, book.store, "orders")
    await passes(clock, tags, 4_000)
    assert not is_waiting(feed)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_without_a_callback_a_warning_is_logged(
    book: Book, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    tags, logged = streams(book, clock), asyncio.Queue[str]()
    monkeypatch.setattr(horizon.LOGGER, "warning", lambda text, *config: logged.put_nowait(text % config))
    first = asyncio.ensure_future(anext(tags.read("paid", follow=True)))
    await passes(clock, tags, 7_000)
    async with asyncio.timeout(30):
        text = await logged.get()
    assert "tidebook pipeline replicate" in text
    assert "tag 'paid'" in text
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_the_status_names_horizon_age_holder_lag_and_remedy(book: Book, clock: ManualClock) -> None:
    assert (await book.tags.status()).topic is None
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await book.journal("orders").append("o-1", [Event(2, tags={"paid"})])
    status = await book.tags.status()
    assert (status.topic, status.lag) == ("orders", 1)
    assert status.remedy is not None
    await replicate(book.log, book.store, "orders")
    status = await book.tags.status(["orders"])
    assert (status.lag, status.remedy) == (0, None)
