"""Measure how long a new process takes to its first batch: `python -m bench.pipeline_parts.start JOB BOOK TOPIC`.

JOB is `replicate`, or `bare`: a streaming job over the same records through the same Kafka source, in as few tasks, and
a `mapInArrow` that counts them, to measure Spark alone. It prints the parts of that time: until the book is open, for
Spark's context or session, and from there to the end of the first batch or lease.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from tidebook.runtime.blocking_portal import BlockingPortal
    from tidebook.wiring.book import Book

BEGAN = time.perf_counter()
NOW = Callable[[], None]


def main() -> None:
    """Start Spark and the job; print the time of each part, and of all up to the first batch."""
    kind, where, topic = sys.argv[1:]
    import tidebook
    from tidebook.pipeline.session import job_context, job_session
    from tidebook.runtime.blocking_portal import BlockingPortal

    portal = BlockingPortal()
    book = tidebook.open(where)
    portal.run(book.__aenter__())
    opened = time.perf_counter()
    first: list[float] = []

    def now() -> None:
        first.append(time.perf_counter())

    spark: SparkSession | SparkContext
    if kind == "replicate":  # as `tidebook pipeline replicate` does, but after opening the book instead of concurrently
        spark = job_context("tidebook bench", book.settings)
        ready = time.perf_counter()
        replicate(spark, book, portal, topic, now)
    else:
        spark = job_session("tidebook bench", book.settings)
        ready = time.perf_counter()
        bare(spark, book, portal, topic, now)
    parts = {"open_s": opened - BEGAN, "session_s": ready - opened, "query_s": first[0] - ready}
    print(json.dumps({**parts, "first_batch_s": first[0] - BEGAN}))
    spark.stop()
    portal.run(book.__aexit__(None, None, None))


def replicate(spark: SparkContext, book: Book, portal: BlockingPortal, topic: str, now: NOW) -> None:
    """Run the pipeline's job."""
    from tidebook.pipeline.jobs.replicate import Replication

    Replication(spark, book, portal, topics=[topic], on_batch=lambda number, done: now()).run(once=True)


def bare(spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, now: NOW) -> None:
    """Run the simplest Spark job over the same records."""
    from tidebook.pipeline.source.records import coalesce_to_cores, stream_records

    config = portal.run(book.journal(topic).create())
    starts = {topic: {str(number): 0 for number in range(config.partitions)}}

    def each(batch: DataFrame, number: int) -> None:
        batch.collect()
        now()

    records = stream_records(spark, book.settings, starts, records_max=500_000)
    counted = coalesce_to_cores(spark, records).mapInArrow(_count, "rows long")
    counted.writeStream.foreachBatch(each).trigger(availableNow=True).start().awaitTermination()


def _count(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"rows": pa.array([sum(each.num_rows for each in batches)], pa.int64())})


if __name__ == "__main__":
    main()
