"""Expired journals are purged through the log, and a new append always wins over the purge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.pipeline.workloads import replicate_here
from tidebook.core.action import Mark
from tidebook.core.event import Event
from tidebook.core.record import encode_record
from tidebook.log.port import Outgoing
from tidebook.pipeline.jobs.purge import ExpiredJournal, purge_expired
from tidebook.runtime.clock import SystemClock
from tidebook.wiring.book import Book
from tidebook.wiring.settings import read_settings

TOPIC = "sessions"
DAY_MS = 86_400_000


class Clock(SystemClock):
    """A clock that advances only when a test moves it."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def book(tmp_path: Path, clock: Clock) -> AsyncIterator[Book]:
    async with Book(read_settings(tmp_path / "book"), clock=clock) as book:
        yield book


async def purge(book: Book, *, dry_run: bool = False) -> list[ExpiredJournal]:
    return [each async for each in purge_expired(book, dry_run=dry_run)]


async def append(book: Book, id: str, expire_after: timedelta | None = None) -> None:
    await book.journal(TOPIC).append(id, [Event(1)], expire_after=expire_after)
    await replicate_here(book, book.store, TOPIC)


async def test_a_journal_is_purged_after_its_expiry_even_days_later(book: Book, clock: Clock) -> None:
    await append(book, "short", timedelta(hours=1))
    await append(book, "for ever")
    assert await purge(book) == []
    clock.ms += 5 * DAY_MS
    [gone] = await purge(book)
    assert (gone.id, gone.purged) == ("short", True)
    assert await book.journal(TOPIC).pointer("short") is None
    assert await book.journal(TOPIC).pointer("for ever") == 1


async def test_a_new_append_wins_over_a_purge_decided_from_an_older_store(book: Book, clock: Clock) -> None:
    await append(book, "s-1", timedelta(hours=1))
    clock.ms += DAY_MS
    await book.journal(TOPIC).append("s-1", [Event(2)])  # not replicated yet
    [kept] = await purge(book)
    assert not kept.purged
    assert await book.journal(TOPIC).pointer("s-1") == 2


async def test_a_purge_that_waits_for_replication_is_not_repeated(book: Book, clock: Clock) -> None:
    await append(book, "s-1", timedelta(hours=1))
    clock.ms += DAY_MS
    assert [each.purged for each in await purge(book)] == [True]
    assert [each.purged for each in await purge(book)] == [False]
    await replicate_here(book, book.store, TOPIC)
    assert await purge(book) == []


async def test_a_dry_run_only_reports(book: Book, clock: Clock) -> None:
    await append(book, "s-1", timedelta(hours=1))
    clock.ms += DAY_MS
    assert [each.purged for each in await purge(book, dry_run=True)] == [False]
    assert await book.journal(TOPIC).pointer("s-1") == 1


async def test_graves_are_removed_when_the_log_no_longer_has_their_records(book: Book, clock: Clock) -> None:
    journal = book.journal(TOPIC)
    for id in ("gone", "again", "there"):
        await append(book, id)
    for id in ("gone", "again"):
        await journal.purge(id)
    await append(book, "again")
    clock.ms += 30 * DAY_MS
    config = await journal.topic_config()
    tick = encode_record(Mark(config.epoch, clock.ms), limit_bytes=config.limit_bytes)
    for number in range(config.partitions):
        await book.log.append(Outgoing(TOPIC, number, None, tick))
    await append(book, "there")
    await purge(book)
    assert await graves(book) == ["gone"]  # the log could still be read from its beginning
    for number in range(config.partitions):
        await book.log.truncate(TOPIC, number, before=await book.log.end(TOPIC, number))
    assert await purge(book, dry_run=True) == []
    assert await graves(book) == ["gone"]
    await purge(book)
    assert await graves(book) == []
    assert [await journal.pointer(id) for id in ("gone", "again", "there")] == [None, 1, 2]
    assert (await journal.append("gone", [Event(1)], expected=0)).last == 1


async def graves(book: Book) -> list[str]:
    return [id async for id, _ in book.store.graves(TOPIC)]
