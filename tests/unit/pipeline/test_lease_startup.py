"""Leases make progress however long a worker takes to start."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from tidebook.core.topic_config import TopicConfig

pytest.importorskip("pyspark")

from tidebook.pipeline import lease_scheduler
from tidebook.pipeline.lease import Lease, LeaseTask
from tidebook.pipeline.lease_scheduler import LeaseScheduler
from tidebook.pipeline.task_result import TaskResult

LEASE_S = 0.2
#: The start of a worker takes longer than a lease and the time by which it may be overdue.
START_S = 0.9
BOUND_S = 20.0


class OneSlot:
    """A Spark context with one slot; its first task, and each one after a cancelled task, starts a worker."""

    def __init__(self) -> None:
        self._slot = threading.Lock()
        self._cancelled: dict[str, threading.Event] = {}
        self._local = threading.local()
        self._has_worker = False
        self.cancelled = 0

    def setJobGroup(self, group: str, *_: Any, **__: Any) -> None:
        self._local.group = group
        self._cancelled[group] = threading.Event()

    def cancelJobGroup(self, group: str) -> None:
        self.cancelled += 1
        self._cancelled[group].set()

    def parallelize(self, *_: Any) -> OneSlot:
        return self

    def mapPartitions(self, task: LeaseTask) -> OneSlot:
        self._local.lease = msgspec.json.decode(task.lease, type=Lease)
        return self

    def collect(self) -> list[bytes]:
        cancelled = self._cancelled[self._local.group]
        with self._slot:
            if cancelled.wait(0.0 if self._has_worker else START_S):
                self._has_worker = False
                raise RuntimeError("cancelled")
            self._has_worker = True
            if cancelled.wait(self._local.lease.seconds):
                self._has_worker = False
                raise RuntimeError("cancelled")
        return [msgspec.json.encode(TaskResult("t", 0, 1, 0, 1.0, None))]

    @property
    def _jsc(self) -> Any:
        return self

    def sc(self) -> Any:
        return self

    def resourceProfileManager(self) -> Any:
        return self

    def defaultResourceProfile(self) -> Any:
        return self

    def maxNumConcurrentTasks(self, _: Any) -> int:
        return 1


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> OneSlot:
    monkeypatch.setattr(lease_scheduler, "OVERLAP_S", 0.05)
    monkeypatch.setattr(lease_scheduler, "OVERDUE_S", 0.1)
    monkeypatch.setattr(lease_scheduler, "InheritableThread", threading.Thread)
    return OneSlot()


def test_a_worker_may_take_longer_to_start_than_a_lease(context: OneSlot) -> None:
    results: list[TaskResult] = []
    scheduler = LeaseScheduler(
        context,  # type: ignore[arg-type]
        run="run",
        lease_s=LEASE_S,
        new_task=lambda lease: LeaseTask("", lease, 1.0),
        on_end=results.extend,
        revoke=lambda generation: None,
    )
    scheduler.assign({"t": TopicConfig(topic_id="t", partitions=1)})
    deadline_s = time.monotonic() + BOUND_S
    while len(results) < 3 and time.monotonic() < deadline_s:
        scheduler.step(0.02)
    assert len(results) >= 3
    assert context.cancelled > 0
    scheduler.close(2.0)
