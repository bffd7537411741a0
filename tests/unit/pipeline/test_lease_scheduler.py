"""Lease scheduling without Spark: when the next lease is submitted, and how overdue ones are handled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from tidebook.core.errors import Unavailable
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline import lease_scheduler
from tidebook.pipeline.lease_scheduler import HANDOVER_S, OVERDUE_S, OVERLAP_S, LeaseScheduler, _LeaseEnd, _LeaseJob
from tidebook.pipeline.task_result import TaskResult

LEASE_S = 20.0
ORDERS = {"orders": TopicConfig(topic_id="a", partitions=4)}


class RecordingScheduler(LeaseScheduler):
    """A scheduler that submits leases to a list instead of Spark; a test ends them and moves the clock."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.jobs: list[_LeaseJob] = []
        self.cancelled: list[_LeaseJob] = []
        self.revoked: list[int] = []
        self.records = 0
        super().__init__(
            None,  # type: ignore[arg-type]
            run="run",
            lease_s=LEASE_S,
            new_task=lambda lease: pytest.fail("nothing is sent to Spark"),
            on_end=self._count,
            revoke=self.revoked.append,
        )

    def _count(self, results: Any) -> None:
        self.records += sum(each.records for each in results)

    def _run_job(self, running: _LeaseJob, number: int) -> None:
        self.jobs.append(running)

    def _cancel(self, running: _LeaseJob) -> None:
        self.cancelled.append(running)

    def _free_slots(self) -> int:
        return self.slots

    def end(self, job: _LeaseJob, *, records: int = 0, error: Unavailable | None = None) -> None:
        topic, partition = job.lease.partitions[0]
        self._ended.put(_LeaseEnd(job, [TaskResult(topic, partition, records, 0, LEASE_S, None)], error))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the scheduler's clock, and run its threads synchronously."""
    clock = Clock()

    def thread(target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: target(*args))

    monkeypatch.setattr(lease_scheduler, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(lease_scheduler, "InheritableThread", thread)
    return clock


def served(*jobs: _LeaseJob) -> list[tuple[str, int]]:
    return sorted(at for job in jobs for at in job.lease.partitions)


def test_the_next_lease_is_submitted_before_one_ends_and_only_once(clock: Clock) -> None:
    scheduler = RecordingScheduler(slots=1)
    scheduler.assign(ORDERS)
    clock.now_s += LEASE_S - OVERLAP_S - 0.01
    scheduler.step(0)
    assert len(scheduler.jobs) == 1
    clock.now_s += 0.02
    for _ in range(3):
        scheduler.step(0)
    first, second = scheduler.jobs
    assert served(first) == served(second) == [("orders", number) for number in range(4)]
    clock.now_s += OVERLAP_S
    scheduler.end(first)
    scheduler.step(0)
    clock.now_s += LEASE_S - OVERLAP_S - 0.01  # the time of the second lease began when it got the slot
    scheduler.step(0)
    assert len(scheduler.jobs) == 2
    clock.now_s += 0.02
    scheduler.step(0)
    assert len(scheduler.jobs) == 3


@pytest.mark.parametrize(("lease_s", "handover_s"), [(2.0, 2.0), (20.0, HANDOVER_S)])
def test_a_tail_ends_before_the_task_of_its_successor_does(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, lease_s: float, handover_s: float
) -> None:
    scheduler = RecordingScheduler(slots=1)
    monkeypatch.setattr(scheduler, "_lease_s", lease_s)
    scheduler.assign(ORDERS)
    assert scheduler.jobs[0].lease.handover_s == handover_s <= scheduler.jobs[0].lease.seconds


def test_a_lease_that_does_not_end_is_killed_and_its_successor_serves_its_partitions(clock: Clock) -> None:
    scheduler = RecordingScheduler(slots=2)
    scheduler.assign(ORDERS)
    hung, other = scheduler.jobs
    clock.now_s += LEASE_S
    scheduler.step(0)
    scheduler.end(other)
    clock.now_s += OVERLAP_S + OVERDUE_S - 0.01
    scheduler.step(0)
    assert scheduler.cancelled == []
    clock.now_s += 0.02
    scheduler.step(0)
    assert scheduler.cancelled == [hung]
    assert served(*scheduler.jobs[2:4]) == served(hung, other)
    scheduler.end(hung, records=3, error=Unavailable("its task was killed"))
    scheduler.step(0)  # the lane ignores its later end or error
    assert scheduler.records == 3


def test_a_hung_lease_after_leases_that_ended_in_time_is_killed_as_early_as_the_first_one(clock: Clock) -> None:
    scheduler = RecordingScheduler(slots=2)
    scheduler.assign({"orders": TopicConfig(topic_id="a", partitions=1)})
    for hung in (1, 2):
        while len(scheduler.cancelled) < hung:
            clock.now_s += 0.5
            scheduler.step(0)
    clock.now_s += LEASE_S
    scheduler.step(0)
    scheduler.end(scheduler.jobs[-2])
    scheduler.step(0)
    hangs = scheduler.jobs[-1]
    clock.now_s = hangs.began_s + LEASE_S + OVERLAP_S + OVERDUE_S - 0.01
    scheduler.step(0)
    assert hangs not in scheduler.cancelled
    clock.now_s += 0.02
    scheduler.step(0)
    assert hangs in scheduler.cancelled


def test_a_new_topic_is_leased_with_the_others_and_the_leases_before_are_revoked(clock: Clock) -> None:
    scheduler = RecordingScheduler(slots=2)
    scheduler.assign(ORDERS)
    scheduler.assign(ORDERS)
    assert (len(scheduler.jobs), scheduler.revoked) == (2, [])
    scheduler.assign({**ORDERS, "more": TopicConfig(topic_id="b", partitions=1)})
    assert scheduler.revoked == [2]
    assert served(*scheduler.jobs[2:]) == [("more", 0), *(("orders", number) for number in range(4))]
    assert {job.lease.generation for job in scheduler.jobs[2:]} == {2}
    scheduler.end(scheduler.jobs[0], records=5, error=Unavailable("at its end"))
    scheduler.step(0)
    assert scheduler.records == 5


def test_a_topic_adopted_with_more_partitions_is_leased_again(clock: Clock) -> None:
    scheduler = RecordingScheduler(slots=2)
    scheduler.assign(ORDERS)
    scheduler.assign({"orders": TopicConfig(topic_id="c", partitions=6, epoch=2)})
    assert served(*scheduler.jobs[2:]) == [("orders", number) for number in range(6)]


def test_the_partitions_of_a_lost_slot_are_leased_on_the_remaining_ones(clock: Clock) -> None:
    scheduler = RecordingScheduler(slots=2)
    scheduler.assign(ORDERS)
    scheduler.slots = 1
    scheduler.assign(ORDERS)
    assert scheduler.revoked == [2]
    assert served(*scheduler.jobs[2:]) == served(*scheduler.jobs[:2])
    assert len(scheduler.jobs) == 3


def test_a_lease_that_failed_raises_its_error(clock: Clock) -> None:
    scheduler = RecordingScheduler(slots=1)
    scheduler.assign(ORDERS)
    scheduler.end(scheduler.jobs[0], error=Unavailable("the store is down"))
    with pytest.raises(Unavailable, match="the store is down"):
        scheduler.step(0)


def test_a_close_revokes_all_leases_and_kills_those_that_continue(clock: Clock) -> None:
    scheduler = RecordingScheduler(slots=2)
    scheduler.assign(ORDERS)
    ends, continuing = scheduler.jobs
    scheduler.end(ends, records=7)
    scheduler.close(0.01)
    assert (scheduler.revoked, scheduler.records, scheduler.cancelled) == ([2], 7, [continuing])
