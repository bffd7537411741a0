"""What Spark tells of its queries while they run, as metrics and as the latest figures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from tidebook.core.metrics import Metrics
from tidebook.pipeline.session import unless_spark_is_gone

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

#: Of a micro-batch's steps those that tell where its time goes.
STEPS = ("triggerExecution", "addBatch", "latestOffset", "getBatch", "queryPlanning", "walCommit", "commitOffsets")


class Figures(msgspec.Struct, frozen=True):
    """The latest micro-batch that had records."""

    batch: int = -1
    records: int = 0
    records_per_s: float = 0.0
    batch_s: float = 0.0


class Listener(StreamingQueryListener):
    """Feeds metrics with every micro-batch of every query of its session."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._figures = Figures()

    @property
    def figures(self) -> Figures:
        """The latest figures."""
        with self._lock:
            return self._figures

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._metrics.count("pipeline_queries_started")

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self.take(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        self._metrics.gauge("pipeline_records_per_second", 0.0)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._metrics.count("pipeline_queries_ended", failed=event.exception is not None)

    def take(self, progress: Any) -> None:
        """One micro-batch."""
        if progress.numInputRows == 0:
            return
        durations = progress.durationMs
        for step in STEPS:
            if step in durations:
                self._metrics.time("pipeline_batch", durations[step] / 1000, step=step)
        per_s = float(progress.processedRowsPerSecond)
        self._metrics.gauge("pipeline_records_per_second", per_s)
        batch_s = durations.get("triggerExecution", 0) / 1000
        with self._lock:
            self._figures = Figures(progress.batchId, progress.numInputRows, per_s, batch_s)


@contextmanager
def listening(spark: SparkSession, metrics: Metrics) -> Iterator[Listener]:
    """Listen to the session's queries for a while."""
    listener = Listener(metrics)
    spark.streams.addListener(listener)
    try:
        yield listener
    finally:
        with unless_spark_is_gone():
            spark.streams.removeListener(listener)
