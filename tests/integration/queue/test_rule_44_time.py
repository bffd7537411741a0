"""Rule 44: the store's clock decides; the client's clock is only recorded."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import tidebook
from tidebook.runtime.clock import SystemClock
from tidebook.wiring.book import Book
from tidebook.wiring.settings import read_settings

pytestmark = pytest.mark.postgres
HOUR_MS = 3_600_000


class WrongClock(SystemClock):
    """A clock that is off by a fixed time."""

    def __init__(self, off_ms: int) -> None:
        self._off_ms = off_ms

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._off_ms


@pytest.mark.parametrize("off_ms", [-HOUR_MS, HOUR_MS])
async def test_a_client_whose_clock_is_off_by_an_hour_changes_nothing_but_the_insertion_date(
    settings_file: Path, off_ms: int
) -> None:
    async with Book(read_settings(settings_file), clock=WrongClock(off_ms)) as book:
        queue = book.queue("mail")
        await queue.put("due", key="k")
        await queue.put("later", process_at=datetime.now(UTC) + timedelta(minutes=30))
        (job,) = await queue.claim(5, lease=timedelta(seconds=20))
        assert job.data == "due"
        assert abs((job.process_at - datetime.now(UTC)).total_seconds()) < 60
        assert abs((job.lease_until - datetime.now(UTC)).total_seconds()) < 60
        assert abs((job.inserted_at - datetime.now(UTC)).total_seconds()) > 3_000
        assert await queue.claim(5) == []
        await queue.done(job)


@pytest.mark.parametrize("off_ms", [-HOUR_MS, HOUR_MS])
async def test_a_listener_whose_clock_is_off_by_an_hour_wakes_at_the_process_date(
    settings_file: Path, off_ms: int
) -> None:
    async with Book(read_settings(settings_file), clock=WrongClock(off_ms)) as book:
        queue = book.queue("mail")
        at = datetime.now(UTC) + timedelta(milliseconds=600)
        await queue.put("later", process_at=at)
        woken = at
        async for _ in queue.listen():
            woken = datetime.now(UTC)
            if jobs := await queue.claim():
                await queue.done(jobs)
                break
        assert timedelta(0) <= woken - at + timedelta(milliseconds=5) < timedelta(seconds=2)


async def test_slow_entries_are_claimed_only_if_no_other_entry_is_due(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put("slow", priority=200)
    await queue.put("quick", priority=180)
    assert [job.data for job in await queue.claim(20)] == ["quick"]
    assert [job.data for job in await queue.claim(20)] == ["slow"]
