"""Regions on Spark: the data source, and the flush to Parquet."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from tests.pipeline.conftest import opened
from tests.pipeline.flush_faults import end_at
from tidebook.core.errors import InvalidInput
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wal.region import Region
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

STEPS = ("before stage", "after stage", "after link", "after publish", "after one mark")


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def book(request: pytest.FixtureRequest, portal: BlockingPortal, tmp_path: Path) -> Iterator[Book]:
    """A book whose log is embedded, or on the real Kafka; a region needs no store."""
    where = tmp_path / "book"
    if request.param == "kafka":
        where = tmp_path / "tidebook.toml"
        where.write_text(f'[log]\nurl = "kafka://{request.getfixturevalue("kafka_bootstrap")}"\n')
    with opened(portal, where) as found:
        yield found


@pytest.fixture
def namespace() -> str:
    """A separate namespace, because the servers are shared."""
    return f"metrics-{uuid4().hex[:12]}"


class Crash(Exception):
    """Raised where a driver would be killed."""


async def fill(book: Book, namespace: str, *, start: int = 0, stop: int = 300) -> Region:
    region = await book.wal(namespace).open_region(7, create=True)
    for n in range(start, stop):
        await region.write(n % 3, [b"%d" % n, {"n": n}])
    return region


def rows(spark: SparkSession, output: Path) -> list[tuple[int, int, int, Any]]:
    found = spark.read.parquet(str(output)).select("region", "table", "seq", "payload").collect()
    return sorted((r.region, r.table, r.seq, bytes(r.payload)) for r in found)


def expected(stop: int = 300) -> list[tuple[int, int, int, bytes]]:
    held = []
    counts = [0, 0, 0]
    for n in range(stop):
        table = n % 3
        held.append((7, table, counts[table] + 1, b"%d" % n))
        held.append((7, table, counts[table] + 2, b'{"n":%d}' % n))
        counts[table] += 2
    return sorted(held)


def flush(spark: SparkSession, book: Book, portal: BlockingPortal, namespace: str, output: Path) -> int:
    from tidebook.pipeline.jobs.flush_wal import flush_wal

    return sum(each.entries for each in flush_wal(spark, book, portal, namespace=namespace, output=output))


def test_regions_are_a_spark_table(spark: SparkSession, book: Book, portal: BlockingPortal, namespace: str) -> None:
    from tidebook.pipeline.source.format import register

    region = portal.run(fill(book, namespace))
    portal.run(region.mark_deleted(1, 51))
    register(spark)
    reader = spark.read.format("tidebook").option("settings", settings_to_json(book.settings))
    reader = reader.option("wal", namespace)
    found = reader.load()
    assert found.count() == 600 - 50
    one = reader.option("region", 7).option("table", 2).load().orderBy("seq").collect()
    assert [r.seq for r in one] == list(range(1, 201))
    assert (bytes(one[0].payload), one[0].payload_type) == (b"2", "bytes")
    assert (bytes(one[1].payload), one[1].payload_type) == (b'{"n":2}', "json")


def test_slices_together_hold_every_entry_once(book: Book, portal: BlockingPortal, namespace: str) -> None:
    from tidebook.pipeline.source.regions import plan_slices
    from tidebook.wal.mapping import SeqOffsets

    region = portal.run(fill(book, namespace))
    mappings = {table: held.mapping for table, held in region.meta.tables.items()}
    slices = plan_slices(7, region.meta, mappings, slice_bytes=2_000)
    assert len(slices) > 3
    assert all(earlier.stop <= later.start for earlier, later in pairwise(slices))
    found = [
        (table, seq)
        for each in slices
        for table, packed in each.mappings.items()
        for seq in SeqOffsets.unpacked(packed)
    ]
    assert sorted(found) == [(table, seq) for table in range(3) for seq in range(1, 201)]


def test_a_flush_writes_a_folder_a_table_sorted_then_marks(
    spark: SparkSession, book: Book, portal: BlockingPortal, namespace: str, tmp_path: Path
) -> None:
    region = portal.run(fill(book, namespace))
    output = tmp_path / "out"
    assert flush(spark, book, portal, namespace, output) == 600
    assert rows(spark, output) == expected()
    assert sorted(path.name for path in (output / "region=7").iterdir()) == ["table=0", "table=1", "table=2"]
    for folder in (output / "region=7").iterdir():
        (file,) = folder.glob("*.parquet")
        seqs = [r.seq for r in spark.read.parquet(str(file)).collect()]
        assert seqs == sorted(seqs)
    portal.run(region.refresh())
    assert {t: held.latest_marked_deleted for t, held in region.meta.tables.items()} == dict.fromkeys(range(3), 201)
    assert flush(spark, book, portal, namespace, output) == 0
    portal.run(fill(book, namespace, start=300, stop=330))
    assert flush(spark, book, portal, namespace, output) == 60
    assert rows(spark, output) == expected(330)


def test_flushes_that_end_at_any_step_are_finished_by_the_next(
    spark: SparkSession,
    embedded: Book,
    portal: BlockingPortal,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    long_form: bool,
) -> None:
    """Each flush begins with what the one before has left, and ends at the next step; the last one finishes.

    In the long form every step is the end of one flush, which the next one finishes.
    """
    for chain in [(step,) for step in STEPS] if long_form else [STEPS]:
        name, output, stop = f"{namespace}-{chain[0].replace(' ', '-')}", tmp_path / chain[0], 0
        for step in chain:
            portal.run(fill(embedded, name, start=stop, stop=stop + 12))
            stop += 12
            with monkeypatch.context() as broken:
                end_at(step, partial(_crash, step), broken.setattr)
                with pytest.raises(Crash, match=step):
                    flush(spark, embedded, portal, name, output)
        finish(spark, embedded, portal, name, output, start=stop)


def _crash(step: str) -> None:
    raise Crash(step)


@pytest.mark.parametrize(
    "step", [step if step == "after link" else pytest.param(step, marks=pytest.mark.long) for step in STEPS]
)
def test_a_driver_that_is_killed_at_any_step_of_a_flush_leaves_it_to_the_next(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, namespace: str, tmp_path: Path, step: str
) -> None:
    portal.run(fill(embedded, namespace, stop=60))
    portal.run(embedded.wal(namespace).close())  # one process writes at a time
    output = tmp_path / "out"
    command = [sys.executable, "-m", "tests.pipeline.flush_faults", str(embedded.settings.folder), namespace]
    done = subprocess.run([*command, str(output), step], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    finish(spark, embedded, portal, namespace, output, start=60)


def finish(
    spark: SparkSession, book: Book, portal: BlockingPortal, namespace: str, output: Path, *, start: int
) -> None:
    """More entries, another flush: every entry is there once, and the region holds nothing."""
    portal.run(fill(book, namespace, start=start, stop=start + 6))
    flush(spark, book, portal, namespace, output)
    assert rows(spark, output) == expected(start + 6)
    region = portal.run(book.wal(namespace).open_region(7, writable=False))
    portal.run(region.refresh())
    assert region.meta.held_bytes == 0
    assert list((output / "_tidebook" / "staging").iterdir()) == []


def test_a_folder_of_another_namespace_is_refused_and_nothing_is_marked(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, namespace: str, tmp_path: Path
) -> None:
    for name in (namespace, f"{namespace}-b"):
        portal.run(fill(embedded, name, stop=6))
    output = tmp_path / "out"
    assert flush(spark, embedded, portal, namespace, output) == 12
    with pytest.raises(InvalidInput, match="a separate folder"):
        flush(spark, embedded, portal, f"{namespace}-b", output)
    region = portal.run(embedded.wal(f"{namespace}-b").open_region(7, writable=False))
    assert all(held.latest_marked_deleted <= 1 for held in region.meta.tables.values())


def test_an_output_that_workers_cannot_share_is_refused() -> None:
    from tidebook.pipeline.jobs.flush_wal import output_folder

    with pytest.raises(InvalidInput, match="s3"):
        output_folder("s3://bucket/x")
