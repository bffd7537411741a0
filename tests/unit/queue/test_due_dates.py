"""The pauses before polls and announcements grow until the queue changes, and a poll loses no due date."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidebook.queue.port import NEVER_MS, Due, QueueRef, QueueSettings
from tidebook.queue.waker import DueDates, Waker
from tidebook.runtime.metrics import Metrics


@pytest.fixture
def due_dates() -> DueDates:
    return DueDates(QueueRef(1, "mail", QueueSettings()))


def test_polls_become_rarer_until_the_queue_changes(due_dates: DueDates) -> None:
    assert [due_dates.next_poll_s() for _ in range(4)] == [0.05, 0.5, 5.0, 5.0]
    due_dates.reset_backoff()
    assert due_dates.next_poll_s() == 0.05


def test_new_work_is_announced_at_once_and_then_after_growing_pauses(due_dates: DueDates) -> None:
    assert [due_dates.announce_delay_s() for _ in range(5)] == [0.0, 0.05, 0.5, 5.0, 5.0]
    due_dates.reset_backoff()
    assert due_dates.announce_delay_s() == 0.0


def test_work_is_announced_at_once_after_some_of_it_was_claimed(due_dates: DueDates) -> None:
    due_dates.announce_delay_s()
    due_dates.claims = 1
    assert due_dates.announce_delay_s() == 0.0
    due_dates.claims = 0
    assert due_dates.announce_delay_s() == 0.5


def test_work_is_announced_at_once_after_a_poll_without_ready_work(due_dates: DueDates) -> None:
    due_dates.announce_delay_s()
    due_dates.next_poll_s()
    assert due_dates.announce_delay_s() == 0.0


async def test_an_entry_that_is_put_during_a_poll_keeps_its_due_date(due_dates: DueDates) -> None:
    class Store:
        async def due(self, queues: list[QueueRef]) -> list[Due]:
            waker.put(due_dates.ref, 2_000, 1_000)
            return [Due(1_000, NEVER_MS, False, False, (3_000,))]

        async def sleep(self, *_: object) -> None: ...

    store: Any = Store()
    waker = Waker(store, b"", metrics=Metrics())
    waker._watches[1] = due_dates
    due_dates.listeners.add(asyncio.Event())
    due_dates.add_date(9_000)  # added before the poll, which no longer finds it
    await waker._poll([due_dates])
    assert due_dates.dates == [2_000, 3_000]
    assert due_dates.published_sleep == (2_000, False)
    due_dates.cancel_timers()
