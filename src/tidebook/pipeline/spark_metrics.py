"""Record Spark's progress reports of streaming queries as metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import JStreamingQueryListener, StreamingQueryListener

from tidebook.pipeline.session import unless_spark_is_gone
from tidebook.runtime.metrics import Metrics

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

#: The steps of a micro-batch whose durations are recorded.
STEPS = ("triggerExecution", "addBatch", "latestOffset", "getBatch", "queryPlanning", "walCommit", "commitOffsets")


class BatchFigures(msgspec.Struct, frozen=True):
    """Figures of the latest micro-batch that had records."""

    batch: int = -1
    records: int = 0
    records_per_s: float = 0.0
    batch_s: float = 0.0


class BatchMetrics(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of Spark's progress report that are used."""

    batch_id: int
    num_input_rows: int = 0
    processed_rows_per_second: float = 0.0
    duration_ms: dict[str, int] = {}


_decode_batch = msgspec.json.Decoder(BatchMetrics).decode


class _ByJson(JStreamingQueryListener):
    """Reads a progress report as one JSON text.

    PySpark's own listener calls the JVM for each of a hundred fields, which costs more than the rest of the driver.
    """

    pylistener: SparkListener

    def onQueryProgress(self, jevent: Any) -> None:
        self.pylistener.take(_decode_batch(jevent.progress().json()))


class SparkListener(StreamingQueryListener):
    """Records every micro-batch of every query of its session."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._figures = BatchFigures()

    @property
    def figures(self) -> BatchFigures:
        """Return the figures of the latest micro-batch."""
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
        raise NotImplementedError("reports are passed to `take`")

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        self._metrics.gauge("pipeline_records_per_second", 0.0)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        self._metrics.count("pipeline_queries_ended", failed=event.exception is not None)

    def take(self, batch: BatchMetrics) -> None:
        """Record one micro-batch; one without records is ignored."""
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
            self._figures = BatchFigures(batch.batch_id, batch.num_input_rows, per_s, batch_s)


@contextmanager
def spark_listener(spark: SparkSession, metrics: Metrics) -> Iterator[SparkListener]:
    """Add a listener to the session within the context."""
    listener = SparkListener(metrics)
    spark.streams.addListener(listener)
    try:
        yield listener
    finally:
        with unless_spark_is_gone():
            spark.streams.removeListener(listener)
