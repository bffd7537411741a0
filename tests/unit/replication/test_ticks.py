"""Ticks advance the horizon past what is replicated, and are only sent where they are useful."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import tidebook
from tests.unit.replication.ticking import replicate_ticks
from tidebook.core.action import Mark
from tidebook.core.event import Event
from tidebook.core.record import encode_record
from tidebook.log.port import Outgoing
from tidebook.replication.partition import LogAndStore, PartitionReplicator
from tidebook.replication.ticks import (
    FOLLOWED_CHECK_S,
    Ticker,
    TickIntervals,
    replicate_adjacent_ticks,
    ticking,
)
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.metrics import Metrics
from tidebook.tags.horizon import renew_followed
from tidebook.tags.tags import Tags
from tidebook.testing.clock import ManualClock
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book

FOLLOWED_EVERY_S = TickIntervals().followed_s


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
    config = await book.store.topic_config("orders")
    assert config is not None
    return sum([await book.log.end("orders", partition) for partition in range(config.partitions)])


async def payloads(book: Book) -> list[object]:
    return [event.payload async for event in book.tags.read("paid")]


async def test_after_replicated_ticks_all_replicated_events_are_in_the_stream(book: Book) -> None:
    for n in range(5):
        await book.journal("orders").append(f"o-{n}", [Event(n, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await replicate_ticks(book.log, book.store)
    assert sorted(await payloads(book)) == [0, 1, 2, 3, 4]  # type: ignore[type-var]


async def test_a_book_without_tags_is_not_ticked(book: Book) -> None:
    await book.journal("orders").append("o-1", [Event(1)])
    await replicate(book.log, book.store, "orders")
    before = await records(book)
    assert await replicate_ticks(book.log, book.store) == 0
    await Ticker(book.log, book.store).step()
    assert await records(book) == before


async def test_a_ticker_brings_events_below_the_horizon_and_stops_when_nothing_is_appended(book: Book) -> None:
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    assert await ticker.step() == FOLLOWED_CHECK_S
    clock.now_s += 10
    ticked = await records(book)
    await ticker.step()
    assert await records(book) == ticked, "the previous ticks are not replicated yet"
    await replicate(book.log, book.store, "orders")
    assert await payloads(book) == [1]
    clock.now_s += 10
    await ticker.step()
    assert await records(book) == ticked, "no record came after the ticks"
    await book.journal("orders").append("o-1", [Event(2, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    clock.now_s += 10
    await ticker.step()
    await replicate(book.log, book.store, "orders")
    assert await payloads(book) == [1, 2]


async def test_ticks_are_frequent_while_a_stream_is_followed_and_rare_after(book: Book) -> None:
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    assert await ticker.step() == FOLLOWED_CHECK_S
    await book.journal("orders").create()
    await renew_followed(book.store, book.clock)
    clock.now_s += 1
    assert await ticker.step() == FOLLOWED_EVERY_S
    clock.now_s += 11
    assert await ticker.step() == FOLLOWED_CHECK_S


async def test_a_followed_ticker_ticks_right_after_replication_and_at_most_ten_times_a_second(
    book: Book,
) -> None:
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    await book.journal("orders").create()
    await renew_followed(book.store, book.clock)
    await book.journal("orders").append("o-1", [Event(0, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await ticker.step()
    await replicate(book.log, book.store, "orders")
    clock.now_s += 0.1
    await ticker.step()
    clock.now_s += 0.01
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    async with asyncio.timeout(30):
        await ticker.pause(10.0 * 0.01)
    await ticker.step()
    await replicate(book.log, book.store, "orders")
    assert await payloads(book) == [0, 1], "although a step just before found nothing to tick"
    await book.journal("orders").append("o-1", [Event(2, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    before = await records(book)
    for _ in range(4):
        clock.now_s += 0.01
        assert await ticker.step() <= FOLLOWED_EVERY_S
    assert await records(book) == before
    clock.now_s += 0.06
    await ticker.step()
    await replicate(book.log, book.store, "orders")
    assert await payloads(book) == [0, 1, 2]


async def test_ticks_right_after_replicated_records_wait_for_no_micro_batch(book: Book) -> None:
    ticker = Ticker(book.log, book.store)
    await book.journal("orders").create()
    await renew_followed(book.store, book.clock)
    await book.journal("orders").append("o-1", [Event(0, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await ticker.step()
    assert await payloads(book) == []
    ticks = ticker.adjacent
    await asyncio.gather(*(replicate_adjacent_ticks(book.log, book.store, ticks) for _ in range(3)))
    assert await payloads(book) == [0]
    pointers = await book.store.pointers("orders")
    await replicate(book.log, book.store, "orders")  # the job reads the same records
    assert await book.store.pointers("orders") == pointers


async def test_a_tick_with_a_record_before_it_is_left_to_the_job(book: Book) -> None:
    await book.journal("orders").append("o-1", [Event(0, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    done = await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    ticker = Ticker(book.log, book.store)
    await book.journal("orders").create()
    await renew_followed(book.store, book.clock)
    await ticker.step()
    busy = ("orders", done.partition)
    assert busy not in ticker.adjacent
    before = await book.store.pointers("orders")
    await replicate_adjacent_ticks(book.log, book.store, {busy: done.offset + 1})
    assert await book.store.pointers("orders") == before
    await replicate_adjacent_ticks(book.log, book.store, ticker.adjacent)
    after = await book.store.pointers("orders")
    moved = {number for number in after if after[number] != before.get(number)}
    assert moved == {partition for _, partition in ticker.adjacent}
    assert moved


async def test_a_tick_waits_for_no_micro_batch_when_the_records_before_it_are_replicated(book: Book) -> None:
    """A micro-batch may have fixed its end before the tick was sent, and the next one may be far away."""
    done = await book.journal("orders").append("o-1", [Event(0, tags={"paid"})])
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    await renew_followed(book.store, book.clock)
    await ticker.step()
    busy = ("orders", done.partition)
    assert busy not in ticker.adjacent
    await replicate_adjacent_ticks(book.log, book.store, ticker.adjacent)
    config = await book.journal("orders").create()
    batch = PartitionReplicator(LogAndStore(book.log, book.store), *busy, config)
    await batch.catch_up(done.offset + 1)
    clock.now_s += 0.2
    await ticker.step()
    assert ticker.adjacent[busy] == done.offset + 1
    await replicate_adjacent_ticks(book.log, book.store, ticker.adjacent)
    clock.now_s += 0.2
    await ticker.step()
    await replicate_adjacent_ticks(book.log, book.store, ticker.adjacent)
    assert await payloads(book) == [0]


async def test_without_followers_ticks_are_left_to_the_job(book: Book) -> None:
    ticker = Ticker(book.log, book.store)
    await book.journal("orders").append("o-1", [Event(0, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    before = await records(book)
    await ticker.step()
    assert await records(book) > before
    assert not ticker.adjacent


async def test_the_next_tick_brings_events_just_before_a_tick_below_the_horizon(book: Book) -> None:
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


async def test_a_stuck_topic_does_not_prevent_ticks_of_others(book: Book) -> None:
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
    config = await book.store.topic_config("stuck")
    assert config is not None
    ends = [await book.log.end("stuck", partition) for partition in range(config.partitions)]
    assert sum(ends) <= 1 + 2 * config.partitions, "ticks of the stuck topic do not pile up"


async def test_an_idle_book_has_an_old_horizon_but_no_backlog(book: Book) -> None:
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await replicate_ticks(book.log, book.store)
    clock, metrics = ManualClock(book.clock.now_ms() + 3_600_000), Metrics()
    tags = Tags(store=book.store, clock=clock, metrics=metrics)
    assert [event.payload async for event in tags.read("paid")] == [1]
    found = {sample.name: sample.value for sample in metrics.samples()}
    assert found["tags_horizon_lag_seconds"] > 3500
    assert found["tags_horizon_behind_seconds"] < 60
    for n in range(20):
        assert [event async for event in tags.read(f"tag-{n}")] == []
    assert len([sample for sample in metrics.samples() if "horizon" in sample.name]) == 2, (
        "the metrics have no sample per tag"
    )


async def test_pipelines_of_one_topic_each_bring_all_events_below_the_horizon_and_then_stop_ticking(
    book: Book,
) -> None:
    clock = Seconds()
    tickers = {topic: Ticker(book.log, book.store, [topic], monotonic_s=clock) for topic in ("orders", "users")}

    async def rounds(count: int) -> None:
        for _ in range(count):
            for topic, ticker in tickers.items():
                await replicate(book.log, book.store, topic)
                await ticker.step()
            clock.now_s += 5

    for topic in tickers:
        await book.journal(topic).append("j", [Event(topic, tags={"paid"})])
    await rounds(4)
    assert sorted(await payloads(book)) == ["orders", "users"]  # type: ignore[type-var]
    for n in range(3):
        await book.journal("orders").append("j", [Event(n, tags={"paid"})])
        await rounds(4)
        assert (await payloads(book))[-1] == n
    before = await records(book)
    await rounds(10)
    assert await records(book) == before, "ticks of one pipeline do not cause ticks of the other"


async def test_events_are_shown_if_each_topic_has_a_pipeline_of_its_own(book: Book) -> None:
    await book.journal("orders").append("o", [Event(1, tags={"paid"})])
    await book.journal("users").append("u", [Event(2)])
    await replicate(book.log, book.store, "users")
    await replicate(book.log, book.store, "orders")
    await replicate_ticks(book.log, book.store, ["orders"])
    await replicate_ticks(book.log, book.store, ["users"])
    assert await payloads(book) == [1]
    clock = Seconds()
    ticker = Ticker(book.log, book.store, ["users"], monotonic_s=clock)
    await ticker.step()
    await replicate(book.log, book.store, "users")
    await book.journal("orders").append("o", [Event(3, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await replicate_ticks(book.log, book.store, ["orders"])
    clock.now_s += 10
    await ticker.step()
    await replicate(book.log, book.store, "users")
    assert await payloads(book) == [1, 3]


def test_ticks_continue_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = threading.Semaphore(0)

    async def step(ticker: Ticker) -> float:
        tried.release()
        raise ZeroDivisionError

    monkeypatch.setattr(Ticker, "step", step)
    monkeypatch.setattr("tidebook.replication.ticks.FOLLOWED_CHECK_S", 0.01)
    with contextlib.closing(BlockingPortal()) as portal:
        book = portal.run(tidebook.open(tmp_path / "book").__aenter__())
        with ticking(portal, Ticker(book.log, book.store), book.metrics):
            for _ in range(3):
                assert tried.acquire(timeout=30)
        assert book.metrics.counted("tags_tick_failures") >= 2
        portal.run(book.__aexit__(None, None, None))
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("year", [2200, 9999])
async def test_a_mark_of_the_far_future_does_not_carry_the_time_of_the_book_away(book: Book, year: int) -> None:
    orders = book.journal("orders")
    await orders.append("o-1", [Event(1, tags={"paid"})])
    config = await orders.topic_config()
    far = encode_record(Mark(config.epoch, (year - 1970) * 365 * 86_400_000), limit_bytes=config.limit_bytes)
    for partition in range(config.partitions):
        await book.log.append(Outgoing("orders", partition, None, far))
    await orders.append("o-2", [Event(2, tags={"paid"})])
    await replicate(book.log, book.store, "orders")
    await replicate_ticks(book.log, book.store)
    horizon = await book.tags.horizon()
    assert horizon.most_ms < book.clock.now_ms() + 86_400_000
    assert sorted(await payloads(book)) == [1, 2]  # type: ignore[type-var]


@pytest.mark.parametrize("recreated", [False, True])
async def test_a_topic_that_has_lost_its_log_neither_delays_nor_causes_the_ticks_of_others(
    book: Book, recreated: bool
) -> None:
    for topic in ("orders", "lost"):
        for n in range(20):
            await book.journal(topic).append(f"o-{n}", [Event(n, tags={"paid"})])
        await replicate(book.log, book.store, topic)
    await book.log.delete_topic("lost")
    if recreated:
        await book.log.create_topic("lost", 4)
    await renew_followed(book.store, book.clock)
    clock = Seconds()
    ticker = Ticker(book.log, book.store, monotonic_s=clock)
    before = await records(book)
    assert await ticker.step() == FOLLOWED_EVERY_S
    for _ in range(20):
        await replicate(book.log, book.store, "orders")
        clock.now_s += FOLLOWED_EVERY_S
        assert await ticker.step() == FOLLOWED_EVERY_S
    assert await records(book) == before + 4, "nothing came after the first ticks"
    if recreated:
        assert [await book.log.end("lost", number) for number in range(4)] == [1] * 4
    assert {event.payload async for event in book.tags.read("paid", topics=["orders"])} == {*range(20)}
