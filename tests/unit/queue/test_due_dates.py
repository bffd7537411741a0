"""Polling and announcing pauses grow until the queue changes."""

from __future__ import annotations

import pytest

from tidebook.queue.port import QueueRef, QueueSettings
from tidebook.queue.waker import DueDates


@pytest.fixture
def due_dates() -> DueDates:
    return DueDates(QueueRef(1, "mail", QueueSettings()))


def test_polls_become_rarer_until_the_queue_changes(due_dates: DueDates) -> None:
    assert [due_dates.next_poll_s() for _ in range(4)] == [0.05, 0.5, 5.0, 5.0]
    due_dates.reset_backoff()
    assert due_dates.next_poll_s() == 0.05


def test_new_work_is_announced_at_once_and_then_ever_more_rarely(due_dates: DueDates) -> None:
    assert [due_dates.announce_delay_s() for _ in range(5)] == [0.0, 0.05, 0.5, 5.0, 5.0]
    due_dates.reset_backoff()
    assert due_dates.announce_delay_s() == 0.0


def test_work_is_announced_at_once_after_some_of_it_was_claimed(due_dates: DueDates) -> None:
    due_dates.announce_delay_s()
    due_dates.claims = 1
    assert due_dates.announce_delay_s() == 0.0
    due_dates.claims = 0
    assert due_dates.announce_delay_s() == 0.5


def test_a_poll_without_ready_work_makes_the_next_work_new(due_dates: DueDates) -> None:
    due_dates.announce_delay_s()
    due_dates.next_poll_s()
    assert due_dates.announce_delay_s() == 0.0
