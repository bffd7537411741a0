"""How long partitions are unserved between two leases: `python -m bench.pipeline_parts.lease_gap`.

A lease is a task that only sleeps. Each form runs some of them one after another, and the gap is the time from the end
of one task to the start of the next, as the tasks themselves see it; a negative gap is an overlap.
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

from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from bench.timing import percentile
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
