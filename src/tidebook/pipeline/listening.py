"""What Spark tells of its queries while they run, as metrics and as the latest figures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import JStreamingQueryListener, StreamingQueryListener

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


class Batch(msgspec.Struct, frozen=True, rename="camel"):
    """What is wanted of Spark's report of a micro-batch."""

    batch_id: int
    num_input_rows: int = 0
    processed_rows_per_second: float = 0.0
    duration_ms: dict[str, int] = {}


_decode_batch = msgspec.json.Decoder(Batch).decode


class _ByJson(JStreamingQueryListener):
    """Takes a report as one text. PySpark's own asks the JVM for each of its hundred fields, which costs more than the
    rest of the batch's driver."""

    pylistener: Listener

    def onQueryProgress(self, jevent: Any) -> None:
        self.pylistener.take(_decode_batch(jevent.progress().json()))


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

    @property
    def _jlistener(self) -> Any:
        if not hasattr(self, "_jlistenerobj"):
            jvm: Any = SparkContext._jvm
            self._jlistenerobj = jvm.PythonStreamingQueryListenerWrapper(_ByJson(self))
        return self._jlistenerobj

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._metrics.count("pipeline_queries_started")

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        raise NotImplementedError("reports come to `take`")

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        self._metrics.gauge("pipeline_records_per_second", 0.0)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._metrics.count("pipeline_queries_ended", failed=event.exception is not None)

    def take(self, batch: Batch) -> None:
        """One micro-batch."""
        if batch.num_input_rows == 0:
            return
        durations = batch.duration_ms
        for step in STEPS:
            if step in durations:
                self._metrics.time("pipeline_batch", durations[step] / 1000, step=step)
        per_s = batch.processed_rows_per_second
        self._metrics.gauge("pipeline_records_per_second", per_s)
        batch_s = durations.get("triggerExecution", 0) / 1000
        with self._lock:
            self._figures = Figures(batch.batch_id, batch.num_input_rows, per_s, batch_s)


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
