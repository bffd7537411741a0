"""Leases: new records reach the store at once, whatever process dies, hangs, runs twice or is down for a while."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.commands import descendants, processes_with
from tests.pipeline.conftest import OpenBook, opened
from tests.pipeline.faults import StopInSlice, UnavailableAtFirst
from tests.pipeline.gate import TcpGate
from tests.pipeline.test_faults import assert_as_expected, killed
from tests.pipeline.workloads import newer_record, rows_of, write_garbage, write_history
from tidebook.core.errors import LogLost
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.pipeline.session import PipelineSettings
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.testing.servers import Kafka
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidebook.pipeline.jobs.replicate import Progress, Replication

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
CASE_TIMEOUT_S = 60.0
#: Leases so short that many are served in a test.
SHORT = PipelineSettings(lease_s=2.0, look_every_s=0.2, wait_s=1.0)
BATCHES = PipelineSettings(lease_s=0, look_every_s=0.2)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a failed query restart after half a second, however often it has failed."""
    from tidebook.pipeline.jobs import replicate

    monkeypatch.setattr(replicate, "RESTART_MAX_S", replicate.RESTART_FIRST_S)


def replication(spark: SparkSession, book: Book, portal: BlockingPortal, *topics: str, **more: Any) -> Replication:
    from tidebook.pipeline.jobs.replicate import Replication

    more.setdefault("settings", SHORT)
    return Replication(spark, book, portal, topics=topics, **more)


@contextmanager
def running(*jobs: Replication) -> Iterator[None]:
    threads = [threading.Thread(target=job.run) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for job in jobs:
            job.stop()
        for thread in threads:
            thread.join(CASE_TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)


def until(holds: Callable[[], bool], what: str, within_s: float = CASE_TIMEOUT_S) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.05)


def await_replicated(book: Book, portal: BlockingPortal, topic: str, within_s: float = CASE_TIMEOUT_S) -> None:
    """Wait until the store has everything that the log has now."""
    config = portal.run(book.journal(topic).create())
    ends = {number: portal.run(book.log.end(topic, number)) for number in range(config.partitions)}

    def holds() -> bool:
        pointers = portal.run(book.store.pointers(topic))
        return all(
            not end or ((at := pointers.get(number)) is not None and at.position.offset + 1 >= end)
            for number, end in ends.items()
        )

    until(holds, f"{topic} was not replicated", within_s)


def test_records_reach_the_store_over_many_leases(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, open_book: OpenBook
) -> None:
    portal.run(write_history(book, topic, steps=20))
    leases: list[int] = []
    job = replication(spark, book, portal, topic, on_batch=lambda number, done: leases.append(number))
    with running(job):
        for seed in range(2, 5):
            await_replicated(book, portal, topic)
            portal.run(write_history(book, topic, steps=20, seed=seed))
        until(lambda: len(leases) > 4, "leases did not follow one another")
        await_replicated(book, portal, topic)
    assert job.progress().lag == 0
    assert_as_expected(book, portal, topic, open_book)


def test_a_new_topic_is_leased_while_other_leases_continue_and_a_stop_ends_all_without_a_kill(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leases would last for an hour. `./dev bench pipeline` measures how long a stop takes."""
    from tidebook.pipeline.jobs import replicate
    from tidebook.pipeline.lease_scheduler import LeaseScheduler

    killed: list[Any] = []
    for name in ("LEASES_END_S", "STOP_REQUEST_S"):
        monkeypatch.setattr(replicate, name, CASE_TIMEOUT_S)
    monkeypatch.setattr(LeaseScheduler, "_cancel", lambda self, job: killed.append(job))
    long = PipelineSettings(lease_s=3600, look_every_s=0.2)
    with running(replicate.Replication(spark, embedded, portal, settings=long)):
        for name in (topic, f"{topic}-2", f"{topic}-3"):
            portal.run(embedded.journal(name).append("a", [Event(1)]))
            await_replicated(embedded, portal, name)
        portal.run(embedded.journal(topic).append("a", [Event(2)]))
        await_replicated(embedded, portal, topic)
    assert not killed


def test_a_stop_does_not_wait_for_a_store_that_hangs(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leases would last for an hour, and no request of the driver to the store is ever answered."""
    portal.run(embedded.journal(topic).append("a", [Event(1)]))

    async def hang(*arguments: Any, **more: Any) -> Any:
        await asyncio.Event().wait()

    with running(replication(spark, embedded, portal, topic, settings=PipelineSettings(lease_s=3600))):
        await_replicated(embedded, portal, topic)
        for name in ("setting", "set_setting", "pointers", "topics", "topic_config"):
            monkeypatch.setattr(embedded.store, name, hang)


@pytest.mark.parametrize("settings", [SHORT, BATCHES], ids=["leases", "micro-batches"])
def test_a_topic_deleted_from_the_book_and_created_again_does_not_end_the_pipeline(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, settings: PipelineSettings
) -> None:
    """A partition of the deleted topic was stopped at a record of a newer version; the new one has more partitions."""
    other = f"{topic}-other"
    for name in (topic, other):
        portal.run(embedded.journal(name).append("a", [Event("old")]))
    job = replication(spark, embedded, portal, topic, other, settings=settings)
    with running(job):
        for name in (topic, other):
            await_replicated(embedded, portal, name)
        portal.run(write_garbage(embedded, topic, "a", value=newer_record()))
        until(lambda: bool(job.progress().stopped), "the stopped partition was not reported")
        portal.run(embedded.delete_topic(topic))
        until(lambda: not job.progress().stopped, "the deleted topic is still reported")
        portal.run(embedded.journal(other).append("a", [Event("meanwhile")]))
        await_replicated(embedded, portal, other)
        portal.run(embedded.log.create_topic(topic, 6))
        for number in range(20):
            portal.run(embedded.journal(topic).append(f"b-{number}", [Event(number)]))
        await_replicated(embedded, portal, topic)
    assert job.progress().stopped == {}
    assert set(portal.run(rows_of(embedded.store, topic))["heads"]) == {f"b-{number}" for number in range(20)}


def test_micro_batches_catch_up_on_a_backlog_before_leases_begin(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidebook.pipeline.jobs.replicate import Replication

    done: list[str] = []
    for name in ("_run_query", "_run_leases"):
        before = getattr(Replication, name)

        def noted(*arguments: Any, name: str = name, before: Any = before, **more: Any) -> Any:
            done.append(name)
            return before(*arguments, **more)

        monkeypatch.setattr(Replication, name, noted)
    portal.run(write_history(embedded, topic, steps=60))
    settings = PipelineSettings(lease_s=2.0, look_every_s=0.2, catch_up_records=20)
    with running(replication(spark, embedded, portal, topic, settings=settings)):
        until(
            lambda: "_run_leases" in done, "no lease began", 4 * CASE_TIMEOUT_S
        )  # on busy cores a query starts slowly
        await_replicated(embedded, portal, topic)
    assert done[:2] == ["_run_query", "_run_leases"]


@pytest.mark.kafka
@pytest.mark.cassandra
@pytest.mark.parametrize(
    "point", ["within", *(pytest.param(each, marks=pytest.mark.long) for each in ("before", "after"))]
)
def test_a_killed_driver_changes_no_row(
    spark: SparkSession, servers_toml: Path, portal: BlockingPortal, topic: str, open_book: OpenBook, point: str
) -> None:
    """The points are before a slice is written, after its first statement, and after its pointer."""
    with opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=40))
        killed(servers_toml, topic, point, lease_s=5)
        portal.run(book.journal(topic).append("late", [Event({"step": 1})]))
        with running(replication(spark, book, portal, topic)):
            await_replicated(book, portal, topic)
        assert_as_expected(book, portal, topic, open_book)


def test_two_concurrent_pipelines_one_of_them_in_micro_batches_write_the_same_rows(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, open_book: OpenBook
) -> None:
    portal.run(write_history(book, topic, steps=40))
    jobs = [replication(spark, book, portal, topic), replication(spark, book, portal, topic, settings=BATCHES)]
    with running(*jobs):
        portal.run(write_history(book, topic, steps=60, seed=2))
        until(lambda: all(job.progress().batches for job in jobs), "one of the pipelines did nothing")
        portal.run(write_history(book, topic, steps=60, seed=3))
        await_replicated(book, portal, topic)
    assert_as_expected(book, portal, topic, open_book)


def test_workers_that_hang_past_their_lease_are_replaced_and_harmless_when_they_resume(
    spark: SparkSession,
    embedded: Book,
    portal: BlockingPortal,
    topic: str,
    open_book: OpenBook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tidebook.pipeline import lease_scheduler

    monkeypatch.setattr(lease_scheduler, "OVERDUE_S", 0.5)
    portal.run(write_history(embedded, topic, steps=20))
    with running(replication(spark, embedded, portal, topic)):
        await_replicated(embedded, portal, topic)
        hung = workers()
        for pid in hung:
            os.kill(pid, signal.SIGSTOP)
        portal.run(write_history(embedded, topic, steps=40, seed=2))
        await_replicated(embedded, portal, topic)
        for pid in hung:
            with suppress(ProcessLookupError):  # Spark has killed the workers that it replaced
                os.kill(pid, signal.SIGCONT)
        portal.run(write_history(embedded, topic, steps=40, seed=3))
        await_replicated(embedded, portal, topic)
    assert_as_expected(embedded, portal, topic, open_book)


def test_a_slice_of_a_worker_that_was_stopped_past_its_lease_changes_nothing(
    spark: SparkSession,
    book: Book,
    portal: BlockingPortal,
    topic: str,
    tmp_path: Path,
    open_book: OpenBook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker is stopped between plan and writes, and continues after other leases have served its partitions."""
    from tidebook.pipeline import lease_scheduler

    monkeypatch.setattr(lease_scheduler, "OVERDUE_S", CASE_TIMEOUT_S)  # so that the worker is not killed
    stopped, ended = tmp_path / "stopped", [0]
    opening = StopInSlice(str(tmp_path))
    portal.run(write_history(book, topic, steps=20))
    with running(replication(spark, book, portal, topic, opening=opening, on_batch=lambda n, _: ended.append(n))):
        until(lambda: stopped.exists() and bool(stopped.read_text()), "no slice began")
        portal.run(write_history(book, topic, steps=20, seed=2))
        await_replicated(book, portal, topic)
        # Leases share one slot, so the time of the stopped worker's lease has then passed.
        until(lambda: len(ended) > 3, "no other leases ended")
        os.kill(int(stopped.read_text().split()[0]), signal.SIGCONT)
        until((tmp_path / "tried").exists, "the slice was not written")
        portal.run(write_history(book, topic, steps=20, seed=3))
        await_replicated(book, portal, topic)
    assert_as_expected(book, portal, topic, open_book)


def test_a_topic_recreated_under_a_running_pipeline_continues_in_its_new_epoch_after_its_adoption(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str
) -> None:
    """The replication of other topics continues meanwhile."""
    other = f"{topic}-other"
    for name in (topic, other):
        portal.run(book.journal(name).append("o-1", [Event("old")]))
    config = portal.run(book.journal(topic).topic_config())
    partition = partition_of("o-1", config.partitions)
    ended: list[BaseException | None] = []
    job = replication(spark, book, portal, topic, other)

    def run() -> None:
        try:
            job.run()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for name in (topic, other):
            await_replicated(book, portal, name)
        portal.run(book.journal(topic).close())
        portal.run(book.log.delete_topic(topic))
        until(lambda: f"{topic}/{partition}" in job.progress().stopped, "the topic without a log was not reported")
        portal.run(book.journal(other).append("o-1", [Event("meanwhile")]))
        await_replicated(book, portal, other)
        portal.run(book.log.create_topic(topic, config.partitions))
        adopted = portal.run(book.journal(topic).adopt())
        assert adopted.epoch == 2
        for number in range(3):
            portal.run(book.journal(topic).append("o-1", [Event(f"new {number}")]))
        await_replicated(book, portal, topic)
        until(lambda: not job.progress().stopped, "the topic was not resumed")
        portal.run(book.journal(topic).append("o-1", [Event("last")]))
        await_replicated(book, portal, topic)
        assert not ended, ended
    finally:
        job.stop()
        thread.join(CASE_TIMEOUT_S)
    assert ended == [None]
    found = portal.run(rows_of(book.store, topic))
    pointer = portal.run(book.store.pointer(topic, partition))
    assert pointer is not None
    assert pointer.position.epoch == 2
    assert [(event.seq_nr, event.payload) for event in portal.run(events_of(book, topic, "o-1"))] == [
        (1, "old"), (2, "new 0"), (3, "new 1"), (4, "new 2"), (5, "last"),
    ]  # fmt: skip
    assert len(found["events"]["o-1"]) == 5
    assert job.progress().stopped == {}


async def events_of(book: Book, topic: str, id: str) -> list[Any]:
    return [event async for event in book.journal(topic).read(id)]


def workers() -> list[int]:
    """Return the Python workers of this process's Spark: children of its daemon, with the same command line."""
    ours = descendants(os.getpid())
    daemons = [pid for pid in processes_with("pyspark.daemon") if pid in ours]
    found = [pid for pid in daemons if ours[pid] in daemons]
    assert found
    return found


def test_replication_stops_if_retention_has_removed_records_that_are_not_replicated(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    portal.run(write_history(book, topic, steps=60))
    end = portal.run(book.log.end(topic, 0))
    away = tmp_path / "away"
    away.mkdir()

    def report(progress: Progress) -> None:
        if progress.waiting is not None:  # the store is down
            portal.run(book.log.truncate(topic, 0, before=end - 1))

    settings = PipelineSettings(lease_s=2.0, look_every_s=0.2, wait_s=0.1)
    opening = UnavailableAtFirst(str(away), 10_000)
    job = replication(spark, book, portal, topic, opening=opening, report=report, settings=settings)
    with pytest.raises(LogLost) as caught:
        job.run()
    assert (caught.value.partition, caught.value.first, caught.value.last) == (0, 0, end - 2)
    assert "--accept-loss" in str(caught.value)
    assert portal.run(book.store.pointer(topic, 0)) is None


def test_a_lease_that_retention_overtakes_stops_and_skips_no_record(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    """A worker is stopped in a slice, and the log loses the newer records before the worker can read them."""
    stopped = tmp_path / "stopped"
    portal.run(write_history(book, topic, steps=40))
    # One lease, and a driver that does not check: only the worker can notice the loss.
    settings = PipelineSettings(lease_s=3600, look_every_s=3600)
    job = replication(spark, book, portal, topic, opening=StopInSlice(str(tmp_path)), settings=settings)
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(job.run)
        try:
            until(lambda: stopped.exists() and bool(stopped.read_text()), "no slice began")
            pid, partition = map(int, stopped.read_text().split())
            portal.run(write_history(book, topic, steps=200, seed=2))
            end = portal.run(book.log.end(topic, partition))
            portal.run(book.log.truncate(topic, partition, before=end))
            os.kill(pid, signal.SIGCONT)
            with pytest.raises(LogLost) as caught:
                run.result(CASE_TIMEOUT_S)
        finally:
            job.stop()
    lost = caught.value
    assert (lost.partition, lost.last) == (partition, end - 1)
    pointer = portal.run(book.store.pointer(topic, partition))
    assert pointer is not None
    assert pointer.position.offset + 1 == lost.first <= lost.last


@pytest.mark.kafka
@pytest.mark.cassandra
def test_replication_waits_for_a_store_that_is_down(
    spark: SparkSession,
    servers_toml: Path,
    cassandra_address: str,
    portal: BlockingPortal,
    topic: str,
    tmp_path: Path,
    open_book: OpenBook,
) -> None:
    with TcpGate(cassandra_address) as gate, opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=30))
        gated = tmp_path / "gated.toml"
        gated.write_text(servers_toml.read_text().replace(cassandra_address, gate.address))
        waiting = threading.Event()

        def report(progress: Progress) -> None:
            if progress.waiting is not None:
                waiting.set()

        with opened(portal, gated) as through, running(replication(spark, through, portal, topic, report=report)):
            await_replicated(book, portal, topic)
            gate.shut()
            portal.run(write_history(book, topic, steps=30, seed=2))
            assert waiting.wait(CASE_TIMEOUT_S)
            gate.open()
            await_replicated(book, portal, topic)
        assert_as_expected(book, portal, topic, open_book)


@pytest.mark.kafka
@pytest.mark.cassandra
def test_replication_waits_for_a_broker_that_is_killed_and_restarted(
    spark: SparkSession, servers_toml: Path, portal: BlockingPortal, topic: str, tmp_path: Path, open_book: OpenBook
) -> None:
    with Kafka(tmp_path / "kafka") as kafka:
        own = tmp_path / "own.toml"
        text = servers_toml.read_text().splitlines()
        own.write_text("\n".join(f'url = "{kafka.url}"' if "kafka://" in line else line for line in text))
        with opened(portal, own) as book:
            portal.run(write_history(book, topic, steps=20))
            with running(replication(spark, book, portal, topic)):
                await_replicated(book, portal, topic)
                kafka.kill9()
                kafka.restart()
                portal.run(write_history(book, topic, steps=20, seed=2))
                await_replicated(book, portal, topic)
            assert_as_expected(book, portal, topic, open_book)
