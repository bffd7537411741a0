"""A Structured Streaming query that replicates in micro-batches: a backlog, or everything if the run has no leases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from tidebook.core.errors import TidebookError
from tidebook.pipeline.errors import failure_of
from tidebook.pipeline.session import ignore_spark_exit, local_uri
from tidebook.pipeline.task_result import TaskResult
from tidebook.runtime.metrics import Metrics

#: How long `close` waits for the running batch.
STOP_S = 60.0
#: Write the checkpoint asynchronously; it is never read.
ASYNC_CHECKPOINTS = {"asyncProgressTrackingEnabled": "true", "_asyncProgressTrackingOverrideSinkSupportCheck": "true"}
#: The steps of a micro-batch whose durations are recorded.
STEPS = ("triggerExecution", "addBatch", "latestOffset", "getBatch", "queryPlanning", "walCommit", "commitOffsets")


class BatchGate:
    """Admits the batches of a query, one at a time, until it is closed."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._closed = False

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Yield whether the batch may run; it may not once the gate is closed."""
        with self._running:
            yield not self._closed

    def close(self, within_s: float) -> bool:
        """Admit no more batches and wait for the running one; return False if it takes longer than `within_s`."""
        self._closed = True
        ended = self._running.acquire(timeout=within_s)
        if ended:
            self._running.release()
        return ended


class BatchReport(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of Spark's progress report of a micro-batch that are used."""

    #: When the micro-batch began, in a format whose strings sort by time.
    timestamp: str
    num_input_rows: int = 0
    processed_rows_per_second: float = 0.0
    duration_ms: dict[str, int] = {}


def reports_after(query: StreamingQuery, timestamp: str) -> list[BatchReport]:
    """Return the reports of the micro-batches that began after `timestamp`, the newest first; Spark keeps a hundred.

    Each report is read as one JSON text, because PySpark would call the JVM for each of its hundred fields.
    """
    reports: Any = query._jsq.recentProgress()
    found = []
    for index in reversed(range(len(reports))):
        report = msgspec.json.decode(reports[index].json(), type=BatchReport)
        if report.timestamp <= timestamp:
            break
        found.append(report)
    return found


class ReplicationQuery:
    """A running query whose rows are the results of its tasks, which replicate; close it at the end.

    The tasks are part of the query, so that it is planned and sent once and each batch only collects their results for
    `on_batch`. With `trigger_s` it runs until it is closed, else up to the log's present end.
    """

    def __init__(
        self,
        results: DataFrame,
        checkpoint: Path,
        *,
        trigger_s: float | None,
        on_batch: Callable[[int, Sequence[TaskResult]], None],
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._gate = BatchGate()
        self._recorded_at = ""

        def collect(batch: DataFrame, number: int) -> None:
            with self._gate.entered() as entered:
                if entered:
                    on_batch(number, [TaskResult(**row.asDict()) for row in batch.collect()])

        writer = results.writeStream.foreachBatch(collect).option("checkpointLocation", local_uri(checkpoint))
        if trigger_s is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.options(**ASYNC_CHECKPOINTS).trigger(processingTime=f"{trigger_s} seconds")
        self.query = writer.start()
        metrics.count("pipeline_queries_started")

    def has_ended(self, within_s: float) -> bool:
        """Wait up to `within_s` and return whether the query has terminated; raise the cause if it failed."""
        try:
            return bool(self.query.awaitTermination(within_s))  # type: ignore[arg-type]
        except TidebookError:
            raise
        except Exception as error:
            raise failure_of(error) from error

    def record_batches(self) -> BatchReport | None:
        """Record the micro-batches that ended since the last call, and return the latest of them that had records."""
        new: Sequence[BatchReport] = ()
        with ignore_spark_exit():
            new = reports_after(self.query, self._recorded_at)
        if new:
            self._recorded_at = new[0].timestamp
        new = [each for each in new if each.num_input_rows]
        for each in reversed(new):
            for step in STEPS:
                if step in each.duration_ms:
                    self._metrics.time("pipeline_batch", each.duration_ms[step] / 1000, step=step)
        self._metrics.gauge("pipeline_records_per_second", new[0].processed_rows_per_second if new else 0.0)
        return new[0] if new else None

    def close(self) -> None:
        """Let the running batch finish, and stop the query; batches that Spark starts after it do nothing."""
        self._gate.close(STOP_S)
        with ignore_spark_exit():
            self.query.stop()
            self._metrics.count("pipeline_queries_ended", failed=self.query.exception() is not None)
