"""Spark's progress reports of micro-batches."""

from __future__ import annotations

from typing import Any

import msgspec
from pyspark.sql.streaming.query import StreamingQuery

#: The steps of a micro-batch whose durations are recorded.
STEPS = ("triggerExecution", "addBatch", "latestOffset", "getBatch", "queryPlanning", "walCommit", "commitOffsets")


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
