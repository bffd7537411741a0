"""Whatever process dies and whatever the checkpoint contains, the store has the rows of one undisturbed pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.conftest import OpenBook, opened
from tests.pipeline.faults import KillAround, UnavailableAtFirst
from tests.pipeline.gate import TcpGate
from tests.pipeline.workloads import expected_rows, rows_of, write_history
from tidebook.core.event import Event
from tidebook.pipeline.session import PipelineSettings
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidebook.pipeline.jobs.replicate import Progress, Replication

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
BATCHES = PipelineSettings(lease_s=0)
LEASES = PipelineSettings(lease_s=2.0, look_every_s=0.2, wait_s=1.0)
IN_BATCHES_AND_LEASES = pytest.mark.parametrize("settings", [BATCHES, LEASES], ids=["batches", "leases"])
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a failed query restart after half a second, however often it has failed: these tests kill it many times."""
    from tidebook.pipeline.jobs import replicate

    monkeypatch.setattr(replicate, "RESTART_MAX_S", replicate.RESTART_FIRST_S)


def replication(spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, **more: Any) -> Replication:
    from tidebook.pipeline.jobs.replicate import Replication

    more.setdefault("settings", BATCHES)
    return Replication(spark, book, portal, topics=[topic], **more)


def run_until_done(job: Replication, portal: BlockingPortal, timeout_s: float = 600) -> None:
    """Run continuously, across any number of restarts, until everything is replicated."""
    done = threading.Event()
    job._report = lambda progress: done.set() if progress.batches and not progress.lag else None
    thread = threading.Thread(target=job.run)
    thread.start()
    try:
        assert done.wait(timeout_s)
    finally:
        job.stop()
        thread.join(timeout_s)


def assert_as_expected(book: Book, portal: BlockingPortal, topic: str, open_book: OpenBook) -> None:
    fresh = open_book("fresh")
    found, expected = portal.run(rows_of(book.store, topic)), portal.run(expected_rows(book, fresh, topic))
    for what in ("heads", "graves", "events", "tags", "parked"):
        assert found[what] == expected[what], what


@IN_BATCHES_AND_LEASES
def test_a_worker_killed_before_and_after_its_slices_changes_no_row(
    spark: SparkSession,
    embedded: Book,
    portal: BlockingPortal,
    topic: str,
    tmp_path: Path,
    open_book: OpenBook,
    settings: PipelineSettings,
) -> None:
    portal.run(write_history(embedded, topic, steps=60))
    kills = tmp_path / "kills"
    kills.mkdir()
    job = replication(spark, embedded, portal, topic, opening=KillAround(str(kills)), settings=settings)
    run_until_done(job, portal)
    assert len(list(kills.iterdir())) == 4
    assert_as_expected(embedded, portal, topic, open_book)


@IN_BATCHES_AND_LEASES
@pytest.mark.kafka
@pytest.mark.cassandra
def test_a_worker_killed_between_rows_heads_and_pointer_changes_no_row(
    spark: SparkSession,
    servers_toml: Path,
    portal: BlockingPortal,
    topic: str,
    tmp_path: Path,
    open_book: OpenBook,
    long_form: bool,
    settings: PipelineSettings,
) -> None:
    kills = tmp_path / "kills"
    kills.mkdir()
    rounds = tuple(range(1, 40)) if long_form else (1, 3, 9)
    with opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=60, ids=10))
        opening = KillAround(str(kills), rounds=rounds)
        job = replication(spark, book, portal, topic, opening=opening, settings=settings)
        run_until_done(job, portal)
        assert len(list(kills.iterdir())) >= 2
        assert_as_expected(book, portal, topic, open_book)


def test_two_concurrent_replicators_write_the_same_rows(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, open_book: OpenBook
) -> None:
    portal.run(write_history(book, topic, steps=60))
    jobs = [replication(spark, book, portal, topic) for _ in range(2)]
    threads = [threading.Thread(target=job.run, kwargs={"once": True}) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert_as_expected(book, portal, topic, open_book)


def test_old_copied_and_damaged_checkpoints_have_no_effect(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, tmp_path: Path, open_book: OpenBook
) -> None:
    """The job is made to use a given checkpoint; by default it uses a fresh one each time."""
    checkpoint, old = tmp_path / "checkpoint", tmp_path / "old"
    portal.run(write_history(book, topic, steps=60))
    replication(spark, book, portal, topic, checkpoint=checkpoint).run(once=True)
    shutil.copytree(checkpoint, old)

    # The last commit is missing: Spark repeats the last batch.
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    last.unlink()
    (checkpoint / "commits" / f".{last.name}.crc").unlink(missing_ok=True)
    portal.run(write_history(book, topic, steps=30, seed=2))
    replication(spark, book, portal, topic, checkpoint=checkpoint).run(once=True)

    # A checkpoint that is older than the store.
    portal.run(write_history(book, topic, steps=30, seed=3))
    replication(spark, book, portal, topic, checkpoint=old).run(once=True)
    assert_as_expected(book, portal, topic, open_book)


def test_a_store_older_than_the_checkpoint_loses_nothing(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path, open_book: OpenBook
) -> None:
    checkpoint, folder = tmp_path / "checkpoint", embedded.settings.folder
    portal.run(write_history(embedded, topic, steps=40))
    replication(spark, embedded, portal, topic).run(once=True)
    portal.run(embedded.__aexit__(None, None, None))
    shutil.copytree(folder, tmp_path / "backup")
    portal.run(embedded.__aenter__())
    portal.run(write_history(embedded, topic, steps=40, seed=2))
    replication(spark, embedded, portal, topic, checkpoint=checkpoint).run(once=True)
    portal.run(embedded.__aexit__(None, None, None))
    for file in folder.glob("store.db*"):
        file.unlink()
    for file in (tmp_path / "backup").glob("store.db*"):
        shutil.copy(file, folder / file.name)
    portal.run(embedded.__aenter__())
    portal.run(write_history(embedded, topic, steps=40, seed=3))
    replication(spark, embedded, portal, topic, checkpoint=checkpoint).run(once=True)
    assert_as_expected(embedded, portal, topic, open_book)


def test_replication_waits_for_a_store_that_is_down(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path, open_book: OpenBook
) -> None:
    portal.run(write_history(embedded, topic, steps=30))
    away = tmp_path / "away"
    away.mkdir()
    done = replication(spark, embedded, portal, topic, opening=UnavailableAtFirst(str(away), 4)).run(once=True)
    assert done.lag == 0
    assert len(list(away.iterdir())) == 4
    assert_as_expected(embedded, portal, topic, open_book)


def killed(where: Path, topic: str, point: str, lease_s: float = 0) -> None:
    """Run a driver as a separate process that is killed at a point of its first batch."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.faults", str(where), topic, point, str(lease_s)],
        cwd=ROOT, env=environment, capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr.decode()


@pytest.mark.parametrize(
    "point", ["commit", *(pytest.param(each, marks=pytest.mark.long) for each in ("before", "after"))]
)
def test_a_killed_driver_changes_no_row(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, open_book: OpenBook, point: str
) -> None:
    """The points are before and after the store's first write, after its pointer, and before Spark's commit."""
    portal.run(write_history(embedded, topic, steps=80))
    killed(embedded.settings.folder, topic, point)
    portal.run(embedded.journal(topic).append("late", [Event({"step": 1})]))
    replication(spark, embedded, portal, topic).run(once=True)
    assert_as_expected(embedded, portal, topic, open_book)


@pytest.mark.long
@pytest.mark.kafka
@pytest.mark.cassandra
def test_a_driver_killed_between_rows_pointer_and_commit_changes_no_row(
    spark: SparkSession, servers_toml: Path, portal: BlockingPortal, topic: str, open_book: OpenBook
) -> None:
    """The points are after a slice's first and last statement, after its pointer, and before Spark's commit."""
    with opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=80))
        partitions = portal.run(book.journal(topic).create()).partitions
        killed(servers_toml, topic, "within")
        assert len(portal.run(book.store.pointers(topic))) < partitions
        killed(servers_toml, topic, "after")
        assert portal.run(book.store.pointers(topic))
        portal.run(write_history(book, topic, steps=40, seed=2))
        killed(servers_toml, topic, "commit")
        portal.run(book.journal(topic).append("late", [Event({"step": 1})]))
        replication(spark, book, portal, topic).run(once=True)
        assert_as_expected(book, portal, topic, open_book)


@pytest.mark.kafka
@pytest.mark.cassandra
def test_replication_waits_for_a_store_that_cannot_be_reached(
    spark: SparkSession,
    servers_toml: Path,
    cassandra_address: str,
    portal: BlockingPortal,
    topic: str,
    tmp_path: Path,
    open_book: OpenBook,
) -> None:
    """While the gate in front of Cassandra is shut, the job reports what it waits for; then it continues."""
    with TcpGate(cassandra_address) as gate, opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=60))
        gated = tmp_path / "gated.toml"
        text = servers_toml.read_text().replace(cassandra_address, gate.address)
        gated.write_text(f"{text}[pipeline]\nrecords_max = 20\nwait_s = 1\nlook_every_s = 0.5\nlease_s = 0\n")
        waited, done = threading.Event(), threading.Event()

        def report(progress: Progress) -> None:
            if progress.waiting is not None:
                waited.set()
                gate.open()
            elif waited.is_set() and progress.lag == 0:
                done.set()

        def on_batch(number: int, tasks: object) -> None:
            if not waited.is_set():
                gate.shut()

        with opened(portal, gated) as through:
            job = replication(spark, through, portal, topic, report=report, on_batch=on_batch, settings=None)
            thread = threading.Thread(target=job.run)
            thread.start()
            try:
                assert waited.wait(120)
                assert done.wait(120)
            finally:
                gate.open()
                job.stop()
                thread.join(120)
        assert_as_expected(book, portal, topic, open_book)
