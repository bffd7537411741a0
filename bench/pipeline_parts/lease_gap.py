"""Measure how long no lease serves a partition when one lease follows another.

`tail_gaps` measures the pipeline's own leases while all slots are in use, as `./dev bench pipeline --only gap` does.
`python -m bench.pipeline_parts.lease_gap` compares the variants that were considered, each on one slot. There a lease
is a task that only sleeps; the gap is the time from the end of one task to the start of the next, as recorded by the
tasks.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyspark import InheritableThread, SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from bench.timing import percentile
from tidebook.core.event import Event
from tidebook.pipeline.lease import LeaseTask, revoke_leases
from tidebook.pipeline.lease_scheduler import HANDOVER_S, LeaseScheduler
from tidebook.pipeline.session import PipelineSettings, spark_session
from tidebook.replication.partition import Partition
from tidebook.replication.tail import ReplicationTail
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

LEASE_S = 2.0
LEASES = 8
#: The number of first leases that are not counted.
WARM_UP = 3
#: The lease of the pipeline's tasks here, as long as a hand-over; the default is longer, with the same hand-over.
TAIL_LEASE_S = HANDOVER_S
HANDOVERS = 40
PATIENCE_S = 60.0
OVERLAP_S = 1.0

Span = tuple[float, float]


def hold(rows: Iterable[Any]) -> Iterator[Span]:
    """Run a lease; yield when its task began and ended."""
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
    """A reader that always has a new lease."""

    def initialOffset(self) -> dict[str, Any]:
        return {"lease": 0}

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return {"lease": time.time_ns()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[Span]:
        return hold(())


def streaming_source(spark: SparkSession) -> list[Span]:
    """Run leases as micro-batches of a Python streaming source."""
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
    """Run leases as jobs, each submitted after the previous one has ended."""
    context = spark.sparkContext
    return [span for _ in range(LEASES) for span in context.parallelize([0], 1).mapPartitions(hold).collect()]


def jobs_ahead(spark: SparkSession) -> list[Span]:
    """Run leases as jobs on one slot, each submitted before the previous one ends."""
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


class RecordedTail(ReplicationTail):
    """Appends to a file when it began to serve its partitions, and when it ended."""

    def __init__(self, *arguments: Any, spans: str, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._spans, self._name = Path(spans), f"{os.getpid()}-{time.monotonic_ns()}"

    async def run(self, stops: Mapping[Partition, int] | None = None) -> None:
        recording = asyncio.create_task(self._record_ready())
        try:
            await super().run(stops)
        finally:
            recording.cancel()
            self._record("ended")

    async def _record_ready(self) -> None:
        await self.ready.wait()
        self._record("ready")

    def _record(self, event: str) -> None:
        lane = min(number for _, number in self.replicators)
        with self._spans.open("a") as spans:
            spans.write(f"{json.dumps([lane, self._name, event, time.time()])}\n")


def tail_gaps(context: SparkContext, book: Book, portal: BlockingPortal, topic: str) -> list[float]:
    """Lease a topic with the pipeline's scheduler, one lane per core; return the gaps of all hand-overs in seconds.

    A gap is the time from the end of a lane's tail until the next tail is ready; a negative one is an overlap.
    """
    config, run = portal.run(book.journal(topic).create()), f"gap-{topic}"
    with tempfile.TemporaryDirectory(prefix="tidebook-lease-gap-") as folder:
        spans = Path(folder) / "spans"
        new_tail = partial(RecordedTail, spans=str(spans))
        scheduler = LeaseScheduler(
            context,
            run=run,
            lease_s=TAIL_LEASE_S,
            new_task=lambda lease: LeaseTask(settings_to_json(book.settings), lease, 5.0, new_tail=new_tail),
            on_end=lambda results: None,
            revoke=lambda generation: portal.run(revoke_leases(book.store, run, generation)),
        )
        deadline_s = time.monotonic() + HANDOVERS * TAIL_LEASE_S + PATIENCE_S
        scheduler.assign({topic: config})
        try:
            while len(gaps := _gaps(spans)) < HANDOVERS:
                assert time.monotonic() < deadline_s, f"{len(gaps)} hand-overs: the leases did not succeed each other"
                scheduler.step(0.2)
                portal.run(book.journal(topic).append("o-1", [Event(1)]))
        finally:
            scheduler.close(2 * TAIL_LEASE_S)
    return gaps


def _gaps(spans: Path) -> list[float]:
    ready: dict[tuple[int, str], float] = {}
    ended: dict[tuple[int, str], float] = {}
    for line in spans.read_text().splitlines() if spans.exists() else []:
        lane, tail, event, at = json.loads(line)
        (ready if event == "ready" else ended)[lane, tail] = at
    found = []
    for lane in {lane for lane, _ in ready}:
        tails = sorted((at, key) for key, at in ready.items() if key[0] == lane)[WARM_UP:]
        for (_, before), (at, after) in pairwise(tails):
            if before in ended and after in ended:
                found.append(at - ended[before])
    return found


@contextmanager
def busy_cores() -> Iterator[None]:
    """Run two busy processes for each core."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Print the gaps of each variant as one JSON object."""
    found: dict[str, float] = {}
    # One slot, so that a lease that is submitted early must wait for it.
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
