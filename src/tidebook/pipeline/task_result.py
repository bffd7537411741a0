"""The result that a Spark task reports for each log partition that it has replicated."""

from __future__ import annotations

import msgspec


class TaskResult(msgspec.Struct, frozen=True):
    """The result of one partition in one task."""

    topic: str
    partition: int
    #: How many records the task received for the partition, and how many of them it parked.
    records: int
    parked: int
    seconds: float
    #: Why the partition is stopped, if it is.
    stopped: str | None


TASK_RESULT_SCHEMA = "topic string, partition int, records long, parked long, seconds double, stopped string"
