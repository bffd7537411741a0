"""A replication run ends on request, and if the log has lost records; failures of its monitoring do not disturb it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.conftest import opened
from tidebook.core.errors import LogLost, OutcomeUnknown, Unavailable
from tidebook.core.event import Event
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

#: Few records become many micro-batches, and the state is checked often.
SMALL = "[pipeline]\nrecords_max = 20\nlook_every_s = 0.05\ntrigger_s = 0\nlease_s = 0\n"
RECORDS = 1_000


def replication(spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, **more: Any) -> Any:
    from tidebook.pipeline.jobs.replicate import Replication

    return Replication(spark, book, portal, topics=[topic], **more)


@pytest.fixture
def small(tmp_path: Path, portal: BlockingPortal) -> Iterator[Book]:
    toml = tmp_path / "small.toml"
    toml.write_text(f'folder = "{tmp_path / "book"}"\n{SMALL}')
    with opened(portal, toml) as book:
        yield book


async def write_many(book: Book, topic: str, n: int = RECORDS) -> None:
    journal = book.journal(topic)
    await asyncio.gather(*(journal.append(f"o-{i % 50}", [Event({"step": i}, tags={"paid"})]) for i in range(n)))


@pytest.mark.parametrize("once", [True, False])
def test_a_stop_under_load_lets_the_current_batch_finish_and_begins_no_other(
    spark: SparkSession, small: Book, portal: BlockingPortal, topic: str, once: bool
) -> None:
    portal.run(write_many(small, topic))
    job: Any = None
    stopped_at: list[float] = []

    def on_batch(number: int, done: Any) -> None:
        stopped_at.append(time.monotonic())
        job.stop()

    job = replication(spark, small, portal, topic, on_batch=on_batch)
    thread = threading.Thread(target=job.run, kwargs={"once": once})
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert time.monotonic() - stopped_at[0] < 20
    assert len(stopped_at) < 10
    assert job.progress().lag > RECORDS / 2


def test_a_closed_gate_waits_for_its_current_users_and_admits_no_others() -> None:
    from tidebook.pipeline.replication_query import BatchGate

    gate, within, leave = BatchGate(), threading.Event(), threading.Event()

    def batch() -> None:
        with gate.entered() as entered:
            assert entered
            within.set()
            leave.wait(30)

    thread = threading.Thread(target=batch)
    thread.start()
    assert within.wait(30)
    assert not gate.close(0.01)
    leave.set()
    assert gate.close(30)
    with gate.entered() as entered:
        assert not entered
    thread.join(30)


def test_a_loss_of_records_of_the_log_stops_a_run_and_is_named(
    spark: SparkSession, small: Book, portal: BlockingPortal, topic: str
) -> None:
    """Only on the embedded log: Spark fetches so few records from Kafka in one call, and would replicate all."""
    book = small
    portal.run(write_many(book, topic, 300))
    end = portal.run(book.log.end(topic, 0))
    lost: list[int] = []

    def on_batch(number: int, done: Any) -> None:
        if not lost:
            lost.append(number)
            portal.run(book.log.truncate(topic, 0, before=end - 1))

    with pytest.raises(LogLost) as caught:
        replication(spark, book, portal, topic, on_batch=on_batch).run(once=True)
    assert (caught.value.partition, caught.value.last) == (0, end - 2)
    assert caught.value.first > 0
    assert "--accept-loss" in str(caught.value)


def test_a_temporary_failure_of_the_monitoring_does_not_disturb_the_replication(
    spark: SparkSession, small: Book, portal: BlockingPortal, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidebook.pipeline.jobs import replicate as module
    from tidebook.replication.status import partition_statuses

    looks = [0]

    async def failing_statuses(*arguments: Any, **more: Any) -> Any:
        looks[0] += 1
        if 1 < looks[0] < 5:
            raise Unavailable("the store does not answer")
        return await partition_statuses(*arguments, **more)

    async def failing_note(*arguments: Any) -> None:
        raise OutcomeUnknown("the note was not answered")

    portal.run(write_many(small, topic, 100))
    monkeypatch.setattr(module, "partition_statuses", failing_statuses)
    monkeypatch.setattr(module, "write_job_status", failing_note)
    assert replication(spark, small, portal, topic).run(once=True).lag == 0
    assert looks[0] >= 5
    assert small.metrics.counted("pipeline_queries_started") == 1
