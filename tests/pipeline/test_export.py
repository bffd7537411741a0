"""Events are exported to Parquet and Delta exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.conftest import opened
from tests.pipeline.workloads import lose_log, replicate_here, write_history
from tidebook.core.errors import Conflict
from tidebook.core.event import Event
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


async def more(book: Book, topic: str, n: int) -> None:
    await book.journal(topic).append(f"more-{n}", [Event({"step": n}, tags={"paid"})] * 3)
    await replicate_here(book, book.store, topic)


async def numbers(book: Book, topic: str) -> list[tuple[str, int]]:
    found = []
    async for id in book.journal(topic).ids():
        found += [(id, event.seq_nr) async for event in book.journal(topic).read(id)]
    return sorted(found)


def export(
    spark: SparkSession, book: Book, portal: BlockingPortal, output: Path, topic: str, kind: str = "parquet"
) -> Any:
    from tidebook.pipeline.jobs.export import export as job

    return job(spark, book, portal, output, topics=[topic], table_format=kind)


def exported(spark: SparkSession, output: Path, kind: str) -> list[tuple[str, int]]:
    return sorted((row["id"], row["seq_nr"]) for row in spark.read.format(kind).load(str(output)).collect())


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_each_run_adds_only_new_events(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "lake"
    portal.run(write_history(embedded, topic, steps=80))
    portal.run(replicate_here(embedded, embedded.store, topic))
    first = export(spark, embedded, portal, output, topic, kind)
    portal.run(more(embedded, topic, 1))
    second = export(spark, embedded, portal, output, topic, kind)
    third = export(spark, embedded, portal, output, topic, kind)
    assert (first.events > 30, second.events, third.events) == (True, 3, 0)
    assert exported(spark, output, kind) == portal.run(numbers(embedded, topic))
    days = sorted(path.name for path in output.glob(f"topic={topic}/*"))
    assert days
    assert all(day.startswith("day=") for day in days)


@pytest.mark.kafka
@pytest.mark.cassandra
def test_events_on_the_real_servers_are_exported(
    spark: SparkSession, servers_toml: Path, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    with opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=60))
        portal.run(replicate_here(book, book.store, topic))
        export(spark, book, portal, tmp_path / "lake", topic)
        portal.run(more(book, topic, 1))
        export(spark, book, portal, tmp_path / "lake", topic)
        assert exported(spark, tmp_path / "lake", "parquet") == portal.run(numbers(book, topic))


@pytest.mark.parametrize("step", ["add", "publish"])
def test_a_batch_that_was_interrupted_is_neither_lost_nor_repeated(
    spark: SparkSession,
    embedded: Book,
    portal: BlockingPortal,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """A crash before the manifest leaves staged files; one after it, files that are not yet moved to their folder."""
    from tidebook.wal.flush import FolderManifest

    output = tmp_path / "lake"
    portal.run(more(embedded, topic, 1))
    export(spark, embedded, portal, output, topic)
    portal.run(more(embedded, topic, 2))
    publish = FolderManifest.publish
    begun: list[int] = []

    def publish_once(self: FolderManifest[Any]) -> None:
        begun.append(1)
        publish(self) if len(begun) == 1 else _die()

    with monkeypatch.context() as patch:
        patch.setattr(FolderManifest, step, _die if step == "add" else publish_once)
        with pytest.raises(Exception, match="died here"):
            export(spark, embedded, portal, output, topic)
    portal.run(more(embedded, topic, 3))
    export(spark, embedded, portal, output, topic)
    assert exported(spark, output, "parquet") == portal.run(numbers(embedded, topic))
    assert list((output / "_tidebook" / "staging").glob("*")) == []


def _die(*_: object) -> None:
    raise RuntimeError("died here")


def test_one_of_two_concurrent_exports_changes_nothing(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    from tidebook.pipeline.jobs.export import ParquetTarget

    output = tmp_path / "lake"
    portal.run(more(embedded, topic, 1))
    slow = ParquetTarget(spark, output)
    export(spark, embedded, portal, output, topic)
    rows = spark.read.parquet(str(output))
    with pytest.raises(Conflict):
        slow.add(rows)
    assert exported(spark, output, "parquet") == portal.run(numbers(embedded, topic))


def test_one_of_two_concurrent_exports_to_delta_reports_that_it_added_nothing(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    from tidebook.pipeline.jobs.export import DeltaTarget

    output = tmp_path / "lake"
    portal.run(more(embedded, topic, 1))
    slow = DeltaTarget(spark, str(output))
    export(spark, embedded, portal, output, topic, "delta")
    before = exported(spark, output, "delta")
    with pytest.raises(Conflict):
        slow.add(spark.read.format("delta").load(str(output)), {"another": {"0": 7}})
    assert exported(spark, output, "delta") == before == portal.run(numbers(embedded, topic))
    # A scan that has found no events still reports how far it came.
    target = DeltaTarget(spark, str(output))
    target.add(spark.read.format("delta").load(str(output)).limit(0), {"another": {"epoch": 2, "0": 7}})
    assert DeltaTarget(spark, str(output)).reached() == target.reached()
    assert target.reached()["another"] == {"epoch": 2, "0": 7}


def test_events_that_the_log_has_lost_are_exported_from_the_store(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    output = tmp_path / "lake"
    portal.run(more(embedded, topic, 1))
    export(spark, embedded, portal, output, topic)
    portal.run(more(embedded, topic, 2))
    for number in range(4):
        end = portal.run(embedded.log.end(topic, number))
        portal.run(embedded.log.truncate(topic, number, before=end))
    export(spark, embedded, portal, output, topic)
    assert exported(spark, output, "parquet") == portal.run(numbers(embedded, topic))


def test_an_adopted_topic_is_exported_over_its_epochs(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    """Offsets restart at 0: one export had reached higher ones, the other begins only now."""
    old, new = tmp_path / "old", tmp_path / "new"
    for n in range(8):
        portal.run(more(embedded, topic, n))
    export(spark, embedded, portal, old, topic)
    portal.run(more(embedded, topic, 8))
    portal.run(lose_log(embedded, topic))
    assert portal.run(embedded.journal(topic).adopt()).epoch == 2
    portal.run(more(embedded, topic, 9))
    # The rest of the old epoch, and the new one.
    assert export(spark, embedded, portal, old, topic).events == 6
    assert export(spark, embedded, portal, new, topic).events == 30
    portal.run(more(embedded, topic, 10))
    assert export(spark, embedded, portal, old, topic).events == 3
    assert exported(spark, old, "parquet") == portal.run(numbers(embedded, topic))
    assert len(exported(spark, new, "parquet")) == 30


def test_a_log_that_was_lost_and_not_adopted_yet_is_exported_from_the_store(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, topic: str, tmp_path: Path
) -> None:
    output = tmp_path / "the lake"  # Spark must not turn the space into %20
    portal.run(more(embedded, topic, 1))
    export(spark, embedded, portal, output, topic)
    portal.run(more(embedded, topic, 2))
    portal.run(lose_log(embedded, topic))
    assert export(spark, embedded, portal, output, topic).events == 3
