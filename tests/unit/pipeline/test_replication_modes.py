"""When a replication runs micro-batches, when it runs leases, and how it stops; without Spark."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("pyspark")

from tests.pipeline.workloads import newer_record, write_garbage
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.pipeline.jobs import replicate as module
from tidebook.pipeline.jobs.replicate import Replication
from tidebook.pipeline.session import PipelineSettings
from tidebook.pipeline.task_result import TaskResult
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

TOPIC = "orders"
BACKLOG = 20
SETTINGS = PipelineSettings(lease_s=2.0, look_every_s=0.0, catch_up_records=BACKLOG - 1)


class Run:
    """A replication whose query replicates nothing and whose leases do nothing; it stops after a few steps of either.

    This object stands in for the Spark session and the scheduler.
    """

    sparkContext = None

    def __init__(self, book: Book, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch, *, stuck: bool) -> None:
        self.modes: list[str] = []
        self.steps = 0
        partitions = portal.run(book.journal(TOPIC).create()).partitions
        reason = "a record of a newer version" if stuck else None
        self.result = TaskResult(TOPIC, partition_of("a", partitions), 0, 0, 0.1, reason)
        self.job = Replication(self, book, portal, settings=SETTINGS)  # type: ignore[arg-type]
        monkeypatch.setattr(self.job, "_run_query", self.run_query)
        monkeypatch.setattr(module, "LeaseScheduler", self.scheduler)

    def run_query(self, *arguments: Any, **more: Any) -> bool:
        self.modes.append("query")
        self.job._count_batch(0, [self.result])
        if len(self.modes) > 5:
            self.job.stop()
        return True

    def scheduler(self, context: Any, **more: Any) -> Run:
        self.modes.append("leases")
        return self

    def assign(self, *arguments: Any) -> None:
        pass

    def step(self, within_s: float) -> None:
        self.steps += 1
        if self.steps == 5:
            self.job.stop()

    def close(self, within_s: float) -> None:
        pass


def test_the_backlog_of_a_stopped_partition_does_not_keep_the_others_from_being_leased(
    book: Book, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every query would read that backlog again, and new records of all topics would wait for its end."""
    for _ in range(BACKLOG):
        portal.run(write_garbage(book, TOPIC, "a", value=newer_record()))
    run = Run(book, portal, monkeypatch, stuck=True)
    run.job.run()
    assert run.modes == ["query", "leases"]
    assert run.steps == 5


def test_a_backlog_that_can_be_replicated_is_left_to_micro_batches(
    book: Book, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    portal.run(book.journal(TOPIC).append("a", [Event(0)]))
    run = Run(book, portal, monkeypatch, stuck=False)

    def append_backlog(*arguments: Any) -> None:
        for number in range(BACKLOG):
            portal.run(book.journal(TOPIC).append("a", [Event(number)]))

    monkeypatch.setattr(run, "assign", append_backlog)
    run.job.run()
    assert run.modes[:2] == ["leases", "query"]


@pytest.mark.parametrize("name", ["topics", "pointer", "set_setting"])
def test_a_stop_does_not_wait_for_a_request_that_hangs(
    book: Book, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(module, "STOP_REQUEST_S", 0.1)
    portal.run(book.journal(TOPIC).append("a", [Event(0)]))
    run = Run(book, portal, monkeypatch, stuck=False)
    hangs = threading.Event()

    async def hang(*arguments: Any, **more: Any) -> Any:
        hangs.set()
        await asyncio.Event().wait()

    def lose_store(*arguments: Any) -> None:
        monkeypatch.setattr(book.store, name, hang)

    monkeypatch.setattr(module, "STATUS_EVERY_S", 0.0)
    monkeypatch.setattr(run, "assign", lose_store)
    monkeypatch.setattr(run, "step", lambda within_s: None)
    thread = threading.Thread(target=run.job.run, daemon=True)
    thread.start()
    assert hangs.wait(30)
    run.job.stop()
    thread.join(30)
    assert not thread.is_alive()
