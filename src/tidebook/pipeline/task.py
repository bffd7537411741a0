"""The Spark task that replicates log records, which it receives as Arrow batches, to the store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import msgspec
import pyarrow as pa

from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record
from tidebook.pipeline.arrow import Batches, Task, arrow_schema
from tidebook.pipeline.source.records import merge_slices, value_bytes
from tidebook.pipeline.task_result import TASK_RESULT_SCHEMA, TaskResult
from tidebook.pipeline.worker import OpenStore, SparkWorker, open_settings_store
from tidebook.replication.partition import PartitionReplicator
from tidebook.replication.slice import SLICE_RECORDS_MAX, SLICE_VALUE_BYTES_MAX
from tidebook.wiring.spark import clears_tags

#: Limits over all partitions of a task: two full slices, so that one is planned while another is written.
RECORDS_IN_FLIGHT_MAX = 2 * SLICE_RECORDS_MAX
VALUE_BYTES_IN_FLIGHT_MAX = 2 * SLICE_VALUE_BYTES_MAX


def replicate_task(
    settings: str, configs: dict[str, TopicConfig], *, wait_s: float, opening: OpenStore = open_settings_store
) -> Task:
    """Return a function for `mapInArrow` that replicates its records in order and yields one row per partition."""
    encoded = msgspec.json.encode(configs)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        decoded = msgspec.json.decode(encoded, type=dict[str, TopicConfig])
        partitions = ConcurrentPartitions(SparkWorker.of(settings, opening), decoded, wait_s=wait_s)
        for topic, partition, records in merge_slices(batches):
            partitions.begin(topic, partition, records)
        rows = [msgspec.to_builtins(done) for done in partitions.finish()]
        yield pa.RecordBatch.from_pylist(rows, schema=arrow_schema(TASK_RESULT_SCHEMA))

    return run


class _Running(NamedTuple):
    future: Future[None]
    records: int
    size_bytes: int


class ConcurrentPartitions:
    """Replicates the log partitions of one task concurrently, each partition in offset order."""

    def __init__(self, worker: SparkWorker, configs: dict[str, TopicConfig], *, wait_s: float) -> None:
        self._worker = worker
        self._configs = configs
        self._wait_s = wait_s
        self._clear_tags = clears_tags(worker.settings)
        self._began_s: dict[tuple[str, int], float] = {}
        self._replicators: dict[tuple[str, int], PartitionReplicator] = {}
        #: Slices in flight, the oldest first.
        self._running: dict[tuple[str, int], _Running] = {}

    def begin(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        """Start replicating a partition's next records; block until its previous ones are done and limits allow."""
        key = (topic, partition)
        if key not in self._replicators:
            self._began_s[key] = time.monotonic()
            self._replicators[key] = PartitionReplicator(
                self._worker, *key, self._configs[topic], clear_tags=self._clear_tags, wait_s=self._wait_s
            )
        if key in self._running:
            self._wait_for(key)
        size_bytes = value_bytes(records)
        while self._running and not self._has_room(len(records), size_bytes):
            self._wait_for(next(iter(self._running)))
        future = self._worker.submit(self._replicators[key].replicate(records))
        self._running[key] = _Running(future, len(records), size_bytes)

    def _has_room(self, records: int, size_bytes: int) -> bool:
        running = self._running.values()
        return (
            sum(each.records for each in running) + records <= RECORDS_IN_FLIGHT_MAX
            and sum(each.size_bytes for each in running) + size_bytes <= VALUE_BYTES_IN_FLIGHT_MAX
        )

    def finish(self) -> list[TaskResult]:
        """Wait for all slices in flight; return the result of each partition."""
        while self._running:
            self._wait_for(next(iter(self._running)))
        now_s = time.monotonic()
        return [
            TaskResult(*key, done.records, done.parked, now_s - self._began_s[key], done.stopped)
            for key, done in self._replicators.items()
        ]

    def _wait_for(self, key: tuple[str, int]) -> None:
        running = self._running.pop(key)
        try:
            running.future.result()
        except BaseException:
            # Let the other slices finish, so that their work is not repeated.
            wait([each.future for each in self._running.values()])
            raise
