"""A tail replicates new records of the log from the pointers on, until it is asked to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import tidebook
from tests.pipeline.workloads import expected_rows, newer_record, rows_of, write_garbage, write_history
from tidebook.core.errors import LogLost, Unavailable
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.core.topic_config import TopicConfig
from tidebook.replication.partition import LogAndStore
from tidebook.replication.tail import ReplicationTail
from tidebook.wiring.book import Book

TOPIC = "orders"
SHORTLY_S = 20


@pytest_asyncio.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with tidebook.open(tmp_path / "book") as book:
        yield book


@pytest_asyncio.fixture
async def fresh(tmp_path: Path) -> AsyncIterator[Book]:
    async with tidebook.open(tmp_path / "fresh") as book:
        yield book


async def partitions(book: Book) -> Mapping[tuple[str, int], TopicConfig]:
    config = await book.journal(TOPIC).create()
    return {(TOPIC, number): config for number in range(config.partitions)}


async def tail_of(book: Book, store: Any = None, **more: Any) -> ReplicationTail:
    return ReplicationTail(LogAndStore(book.log, store or book.store), await partitions(book), **more)


@asynccontextmanager
async def running(*tails: ReplicationTail) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(tail.run()) for tail in tails]
    yield
    for tail in tails:
        tail.stop()
    async with asyncio.timeout(SHORTLY_S):
        await asyncio.gather(*tasks)


async def replicated(book: Book, numbers: range | None = None) -> None:
    """Wait until the store has all that the log has now."""
    config = await book.journal(TOPIC).create()
    for number in range(config.partitions) if numbers is None else numbers:
        end = await book.log.end(TOPIC, number)
        async with asyncio.timeout(SHORTLY_S):
            while end and ((at := await book.store.pointer(TOPIC, number)) is None or at.position.offset + 1 < end):
                await book.store.wait(TOPIC, number, beyond=None if at is None else at.position, timeout_s=1)


async def test_records_are_replicated_while_they_come(book: Book, fresh: Book) -> None:
    tail = await tail_of(book)
    await write_history(book, TOPIC, steps=50)
    async with running(tail):
        await write_history(book, TOPIC, steps=50, seed=2)
        await replicated(book)
    assert await rows_of(book.store, TOPIC) == await expected_rows(book, fresh, TOPIC)
    assert sum(each.records for each in tail.replicators.values()) == sum(
        [await book.log.end(*at) for at in tail.replicators]
    )


async def test_two_tails_of_the_same_partitions_write_the_same(book: Book, fresh: Book) -> None:
    async with running(await tail_of(book), await tail_of(book, slice_every_s=0)):
        await write_history(book, TOPIC, steps=80)
        await replicated(book)
    assert await rows_of(book.store, TOPIC) == await expected_rows(book, fresh, TOPIC)


class PausedStore:
    """A store whose first slice waits between plan and writes, as in a worker that was stopped past its lease."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.paused, self.resumed = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def apply(self, writes: Any) -> None:
        if not self.paused.is_set():
            self.paused.set()
            await self.resumed.wait()
        await self._store.apply(writes)


async def test_a_slice_that_is_written_after_its_partition_went_on_elsewhere_changes_nothing(
    book: Book, fresh: Book
) -> None:
    await write_history(book, TOPIC, steps=40)
    store = PausedStore(book.store)
    async with running(await tail_of(book, store)):
        await store.paused.wait()
        async with running(await tail_of(book)):
            await write_history(book, TOPIC, steps=40, seed=2)
            await replicated(book)
        before = await rows_of(book.store, TOPIC)
        store.resumed.set()
        await write_history(book, TOPIC, steps=20, seed=3)
        await replicated(book)
    assert await rows_of(book.store, TOPIC) == await expected_rows(book, fresh, TOPIC) != before


async def test_with_stops_it_ends_by_itself(book: Book) -> None:
    await write_history(book, TOPIC, steps=60)
    tail = await tail_of(book)
    stops = {at: await book.log.end(*at) for at in tail.replicators}
    async with asyncio.timeout(SHORTLY_S):
        await tail.run(stops)
    assert {at: await each.next_offset() for at, each in tail.replicators.items()} == stops


async def test_a_stopped_partition_leaves_the_others_running(book: Book) -> None:
    await write_garbage(book, TOPIC, "o-1", value=newer_record())
    config = await book.journal(TOPIC).create()
    stuck = partition_of("o-1", config.partitions)
    tail = await tail_of(book)
    async with running(tail):
        others = [f"o-{n}" for n in range(20) if partition_of(f"o-{n}", config.partitions) != stuck]
        for id in others:
            await book.journal(TOPIC).append(id, [Event(1)])
        for number in set(range(config.partitions)) - {stuck}:
            await replicated(book, range(number, number + 1))
    assert "upgrade" in (tail.replicators[TOPIC, stuck].stopped or "")
    assert [each.stopped for at, each in tail.replicators.items() if at[1] != stuck] == [None] * 3


async def test_records_that_the_log_lost_end_it(book: Book) -> None:
    await write_history(book, TOPIC, steps=60)
    end = await book.log.end(TOPIC, 0)
    await book.log.truncate(TOPIC, 0, before=end - 1)
    with pytest.raises(LogLost) as caught:
        await (await tail_of(book)).run()
    assert (caught.value.partition, caught.value.last) == (0, end - 2)


class AwayStore:
    """A store that does not answer `times` times."""

    def __init__(self, store: Any, times: int) -> None:
        self._store, self.times = store, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def pointer(self, topic: str, partition: int) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise Unavailable("the store is down")
        return await self._store.pointer(topic, partition)


async def test_a_store_that_is_down_for_a_while_is_waited_for(book: Book) -> None:
    await write_history(book, TOPIC, steps=20)
    away = AwayStore(book.store, 6)
    async with running(await tail_of(book, away, wait_s=30.0)):
        await replicated(book)
    assert away.times < 0


async def test_a_store_that_stays_away_ends_it(book: Book) -> None:
    await write_history(book, TOPIC, steps=20)
    with pytest.raises(Unavailable):
        await (await tail_of(book, AwayStore(book.store, 10**6), wait_s=0.2)).run()
