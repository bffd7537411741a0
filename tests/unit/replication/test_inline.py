"""The replication of an embedded book in its own process: appended events become visible despite failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import tidebook
from tidebook.core.errors import InvalidInput, NotFound, Unavailable
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.log.port import Outgoing
from tidebook.replication import inline
from tidebook.replication.inline import InlineReplication, replicate_to_end
from tidebook.replication.status import JobStatus, read_job_status
from tidebook.sqlite.process_lock import ProcessLock
from tidebook.testing.conformance.store_slices import newer_version
from tidebook.testing.faults import Faults
from tidebook.wiring.book import Book

WITHIN_S = 20.0


async def eventually(reached: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition without a wake-up of its own is true."""
    async with asyncio.timeout(WITHIN_S):
        while not await reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def tagged(book: Book, tag: str = "paid") -> list[Any]:
    return [event.payload async for event in book.tags.read(tag)]


async def next_of(events: AsyncIterator[Any]) -> Any:
    async with asyncio.timeout(WITHIN_S):
        return await anext(events)


async def test_a_follower_sees_what_the_same_process_appends(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        events = book.tags.read("paid", follow=True)
        for number in range(3):
            await book.journal("orders").append(f"o-{number}", [Event(number, tags={"paid"})])
            assert (await next_of(events)).payload == number
        await events.aclose()  # type: ignore[attr-defined]


def test_a_blocking_book_replicates(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path / "book", replicate=True) as book:
        book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        with book.tags.subscribe("paid", "group") as member:
            assert next(iter(member)).payload == 1


async def test_topics_created_later_are_replicated_and_deleted_ones_are_not(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        events = book.tags.read("paid", follow=True)
        await book.journal("orders").append("o-1", [Event("order", tags={"paid"})])
        assert (await next_of(events)).payload == "order"
        await book.delete_topic("orders")
        await book.journal("bills").append("b-1", [Event("bill", tags={"paid"})])
        assert (await next_of(events)).payload == "bill"
        await events.aclose()  # type: ignore[attr-defined]
        assert book.replication is not None
        await eventually(lambda: _no_stopped(book))


async def _no_stopped(book: Book) -> bool:
    assert book.replication is not None
    return not book.replication.status().stopped


async def test_events_of_a_script_are_visible_after_it_has_closed_the_book(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        assert book.replication is not None
        await eventually(lambda: _is(book, "active"))
    async with tidebook.open(tmp_path / "book") as book:
        assert await tagged(book) == [1]


async def _is(book: Book, state: str) -> bool:
    assert book.replication is not None
    return book.replication.status().state == state


async def test_a_book_that_is_only_read_is_not_created(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        assert await tagged(book) == []
        await eventually(lambda: _is(book, "waiting"))
    assert not (tmp_path / "book").exists()


async def test_a_book_without_topics_is_not_polled_in_a_loop(tmp_path: Path) -> None:
    faults = Faults()
    async with tidebook.open(tmp_path / "book", create=True) as book:
        store = faults.around(book.store)
        replication = InlineReplication(book.log, store, clock=book.clock, metrics=book.metrics)
        replication.start()
        await asyncio.sleep(0.3)  # there is no event to wait for
        assert faults.calls["topics"] <= 5
        await replication.close()


async def test_a_book_opened_without_replication_has_none(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book") as book:
        assert book.replication is None


@pytest.mark.parametrize("section", ["[log]\nurl = 'kafka://h:9092'", "[store]\nurl = 'cassandra://h:9042/k'"])
def test_replication_of_servers_is_refused_with_the_remedy(tmp_path: Path, section: str) -> None:
    (tmp_path / "tidebook.toml").write_text(section)
    with pytest.raises(InvalidInput, match="tidebook pipeline replicate"):
        tidebook.open(tmp_path / "tidebook.toml", replicate=True)


async def test_an_idle_book_appends_no_ticks(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        events = book.tags.read("paid", follow=True)
        await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        await next_of(events)
        before = await _settled_ends(book)
        assert await _settled_ends(book) == before
        await events.aclose()  # type: ignore[attr-defined]


async def _settled_ends(book: Book) -> list[int]:
    ends: list[int] = []
    while (now := [await book.log.end("orders", number) for number in range(4)]) != ends:
        ends = now
        await asyncio.sleep(0.3)  # there is no event to wait for
    return ends


async def test_of_two_open_books_one_replicates_and_the_other_takes_over(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as passive:
        async with tidebook.open(tmp_path / "book", replicate=True) as active:
            await active.journal("orders").append("o-1", [Event(1, tags={"paid"})])
            await eventually(lambda: _one_is_active(active, passive))
            if await _is(passive, "active"):
                active, passive = passive, active
        await eventually(lambda: _any_active(active, passive))


async def _one_is_active(first: Book, second: Book) -> bool:
    return (await _is(first, "active") and await _is(second, "passive")) or (
        await _is(first, "passive") and await _is(second, "active")
    )


async def _any_active(*books: Book) -> bool:
    return any([await _is(book, "active") for book in books if book.replication is not None])


async def test_two_replicators_without_a_lock_fence_each_other(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book") as book:
        replications = [
            InlineReplication(book.log, book.store, clock=book.clock, metrics=book.metrics) for _ in range(2)
        ]
        for each in replications:
            each.start()
        ids = [f"o-{n}" for n in range(20)]
        for number in range(10):
            await asyncio.gather(*(book.journal("orders").append(id, [Event(number, tags={"paid"})]) for id in ids))
        await eventually(lambda: _has_all(book, 200))
        for each in replications:
            await each.close()
        for id in ids:
            assert [event.payload async for event in book.journal("orders").read(id)] == list(range(10))
        assert sorted(await tagged(book)) == sorted(list(range(10)) * 20)


async def _has_all(book: Book, count: int) -> bool:
    return len(await tagged(book)) == count


@asynccontextmanager
async def faulty(tmp_path: Path) -> AsyncIterator[tuple[Book, Faults, InlineReplication]]:
    """A book, and a replication of it whose log and store can be made to fail."""
    faults = Faults()
    async with tidebook.open(tmp_path / "book") as book:
        await book.journal("orders").append("o-0", [Event(0, tags={"paid"})])
        log, store = faults.around(book.log), faults.around(book.store)
        replication = InlineReplication(log, store, clock=book.clock, metrics=book.metrics)
        try:
            yield book, faults, replication
        finally:
            await replication.close()


@pytest.mark.parametrize("call", ["apply", "topic", "topics", "topic_config", "pointer", "read", "end", "wait"])
async def test_replication_continues_after_a_failure(tmp_path: Path, call: str) -> None:
    async with faulty(tmp_path) as (book, faults, replication):
        faults.fail(call, Unavailable("it is down"), times=3)
        replication.start()
        await eventually(lambda: _has_all(book, 1))
        assert faults.calls[call] > 3
        assert replication.status().failures >= 1
        assert "it is down" in (replication.status().last_error or "")


async def test_replication_continues_after_an_unexpected_error(tmp_path: Path) -> None:
    async with faulty(tmp_path) as (book, faults, replication):
        faults.fail("topics", cast(Any, ZeroDivisionError("a bug")))
        replication.start()
        await eventually(lambda: _has_all(book, 1))


async def test_a_record_of_a_newer_version_stops_its_partition_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "STATUS_EVERY_S", 0.0)
    async with tidebook.open(tmp_path / "book") as book:
        done = await book.journal("orders").append("o-1", [Event(1)])
        offset = (await book.log.append(Outgoing("orders", done.partition, None, newer_version()))).offset
        replication = InlineReplication(book.log, book.store, clock=book.clock, metrics=book.metrics)
        replication.start()
        at = f"orders/{done.partition}"

        async def reported() -> bool:
            status = await read_job_status(book.store)
            return status is not None and at in status.stopped

        await eventually(reported)
        status = cast(JobStatus, await read_job_status(book.store))
        assert status.engine == "inline"
        assert str(offset) in status.stopped[at]
        other = next(f"p-{n}" for n in range(100) if partition_of(f"p-{n}", 4) != done.partition)
        later = await book.journal("orders").append(other, [Event(2)])
        assert await book.store.wait("orders", later.partition, beyond=None, timeout_s=WITHIN_S)
        await replication.close()


async def test_replication_stops_within_two_seconds_although_the_store_hangs(tmp_path: Path) -> None:
    async with faulty(tmp_path) as (_, faults, replication):
        held = faults.hold("apply")
        replication.start()
        await held.reached()
        began_s = time.monotonic()
        await replication.close()
        assert time.monotonic() - began_s < 2
        held.release()


async def test_replicating_to_the_end_brings_everything_below_the_horizon(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book") as book:
        await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        done = await replicate_to_end(book.log, book.store)
        assert (done.stopped, done.parked) == ({}, 0)
        assert await tagged(book) == [1]


def test_a_lock_in_a_missing_folder_is_not_taken_and_creates_nothing(tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "missing" / "lock")
    assert not lock.take()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_excludes_others_until_it_is_released(tmp_path: Path) -> None:
    first, second = ProcessLock(tmp_path / "lock"), ProcessLock(tmp_path / "lock")
    assert first.take()
    assert first.take(), "the holder keeps the lock"
    assert not second.take()
    first.release()
    assert second.take()
    assert not first.held
    second.release()


def test_a_seized_lock_is_lost_by_its_former_holder_and_by_all_but_the_last(tmp_path: Path) -> None:
    first, second, third = (ProcessLock(tmp_path / "lock") for _ in range(3))
    assert first.take()
    beat = second.last_beat()
    assert beat is not None
    second.seize()
    third.seize()
    assert [each.take() for each in (first, second, third)] == [False, False, True]
    assert third.last_beat() != beat
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    third.release()
    assert first.take()
    first.release()


async def test_deleting_a_topic_ends_the_tasks_of_its_partitions(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", replicate=True) as book:
        await book.journal("orders").append("o-1", [Event(1)])
        await book.delete_topic("orders")
        with pytest.raises(NotFound):
            await book.describe_topic("orders")
        await eventually(lambda: _no_stopped(book))
