"""How long partitions are unserved between two leases.

A lease is a task that only sleeps. The gap is the time from the end of one task to the start of the next, as the tasks
themselves see it; a negative gap is an overlap. `scheduled_gaps` measures the scheduler of the pipeline while all slots
are in use, as `./dev bench pipeline --only gap` does; `python -m bench.pipeline_parts.lease_gap` compares the forms of
the trial, each on one slot.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from pyspark import InheritableThread, SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from bench.timing import percentile
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.lease import Lease, LeaseTask
from tidebook.pipeline.lease_scheduler import LeaseScheduler
from tidebook.pipeline.session import PipelineSettings, spark_session

LEASE_S = 2.0
LEASES = 8
#: The first leases warm up.
WARM_UP = 3
OVERLAP_S = 1.0

Span = tuple[float, float]


def hold(rows: Iterable[Any]) -> Iterator[Span]:
    """The task of a lease: when it began and ended."""
    list(rows)
    began = time.time()
    time.sleep(LEASE_S)
    yield began, time.time()


class LeaseSource(DataSource):
    """A streaming source with one partition, which is a lease."""

    @classmethod
    def name(cls) -> str:
        return "lease_gap"

    def schema(self) -> str:
        return "began double, ended double"

    def streamReader(self, schema: StructType) -> LeaseReader:
        return LeaseReader()


class LeaseReader(DataSourceStreamReader):
    """Has always a new lease to give."""

    def initialOffset(self) -> dict[str, Any]:
        return {"lease": 0}

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return {"lease": time.time_ns()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[Span]:
        return hold(())


def streaming_source(spark: SparkSession) -> list[Span]:
    """Leases as micro-batches of a Python streaming source."""
    spans: list[Span] = []
    done = threading.Event()

    def each(batch: DataFrame, number: int) -> None:
        spans.extend((row["began"], row["ended"]) for row in batch.collect())
        if len(spans) >= LEASES:
            done.set()

    spark.dataSource.register(LeaseSource)
    with tempfile.TemporaryDirectory() as folder:
        writer = spark.readStream.format("lease_gap").load().writeStream.foreachBatch(each)
        query = writer.option("checkpointLocation", f"file://{Path(folder).absolute()}").start()
        done.wait(LEASES * (LEASE_S + 10))
        query.stop()
    return spans


def jobs_in_turn(spark: SparkSession) -> list[Span]:
    """Leases as jobs, each submitted when the one before has ended."""
    context = spark.sparkContext
    return [span for _ in range(LEASES) for span in context.parallelize([0], 1).mapPartitions(hold).collect()]


def jobs_ahead(spark: SparkSession) -> list[Span]:
    """Leases as jobs, each submitted before the one before ends, on one slot: the others are taken."""
    context = spark.sparkContext
    spans: list[Span] = []

    def run() -> None:
        spans.extend(context.parallelize([0], 1).mapPartitions(hold).collect())

    threads = []
    for _ in range(LEASES):
        threads.append(InheritableThread(target=run))
        threads[-1].start()
        time.sleep(LEASE_S - OVERLAP_S if len(threads) == 1 else LEASE_S)
    for thread in threads:
        thread.join()
    return sorted(spans)


class SleepingLease(LeaseTask):
    """A lease that only sleeps, and appends its span to a file of its first partition."""

    def __call__(self, rows: Iterable[Any]) -> Iterator[bytes]:
        lease = msgspec.json.decode(self.lease, type=Lease)
        for span in hold(rows):
            with (Path(self.settings) / str(lease.partitions[0][1])).open("a") as spans:
                spans.write(f"{json.dumps(span)}\n")
        return iter(())


def scheduled_gaps(context: SparkContext) -> list[float]:
    """Let the pipeline's scheduler run a lane of leases for each core; return the gaps of all lanes in seconds."""
    lanes = context.defaultParallelism
    with tempfile.TemporaryDirectory(prefix="tidebook-lease-gap-") as folder:
        scheduler = LeaseScheduler(
            context,
            run="lease-gap",
            lease_s=LEASE_S,
            new_task=lambda lease: SleepingLease(folder, lease, 0.0),
            on_end=lambda results: None,
            revoke=lambda generation: None,
        )
        files = [Path(folder) / str(lane) for lane in range(lanes)]
        deadline_s = time.monotonic() + LEASES * (LEASE_S + 10)
        scheduler.assign({"lease-gap": TopicConfig(topic_id="lease-gap", partitions=lanes)})
        while not all(_count_lines(file) >= LEASES for file in files):
            assert time.monotonic() < deadline_s, "the leases did not follow one another"
            scheduler.step(0.2)
        scheduler.close(2 * LEASE_S)
        spans = [[json.loads(line) for line in file.read_text().splitlines()[WARM_UP:LEASES]] for file in files]
    return [after[0] - before[1] for lane in spans for before, after in pairwise(lane)]


def _count_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def main() -> None:
    """Print the gaps of each form as one JSON object."""
    found: dict[str, float] = {}
    # One slot, so that a lease that was submitted ahead must wait for it.
    spark = spark_session("lease gap", PipelineSettings(master="local[1]"))
    for form in (streaming_source, jobs_in_turn, jobs_ahead):
        spans = form(spark)[WARM_UP:]
        gaps = [after[0] - before[1] for before, after in pairwise(spans)]
        found[f"{form.__name__}_gap_p50_ms"] = round(percentile(gaps, 0.5) * 1000, 1)
        found[f"{form.__name__}_gap_max_ms"] = round(max(gaps) * 1000, 1)
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
