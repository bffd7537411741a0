"""Log records in Spark: streams and ranges of them as DataFrames, and slices of them in tasks.

The embedded log is read through the log port, one Spark partition per log partition; Kafka is read with Spark's own
connector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar
from zlib import crc32

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.functions import col, unix_millis
from pyspark.sql.readwriter import DataFrameReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructType

from tidebook.core.errors import InvalidInput, LogLost
from tidebook.core.position import FIRST_EPOCH
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Record, RecordPage, read_page
from tidebook.pipeline.arrow import Batches, arrow_schema
from tidebook.pipeline.worker import SparkWorker
from tidebook.replication.slice import SLICE_RECORDS_MAX, SLICE_VALUE_BYTES_MAX
from tidebook.wiring.adapters import scheme
from tidebook.wiring.settings import Settings, settings_to_json
from tidebook.wiring.spark import kafka_client_options

NAME = "tidebook_records"
SCHEMA = "topic string, partition int, offset long, timestamp_ms long, key binary, value binary"
_ARROW = arrow_schema(SCHEMA)
PAGE_RECORDS = 10_000
RECORDS_MAX = 500_000
#: Settings of the Java client, whose defaults wait half a second for more data and return 500 records per poll.
KAFKA_TUNING = {
    "fetch.max.wait.ms": "10",
    "max.poll.records": "10000",
    "max.partition.fetch.bytes": str(8 * 1024 * 1024),
    "fetch.max.bytes": str(64 * 1024 * 1024),
}

#: The next offset to read, by topic and partition. Spark stores it as JSON, so partition numbers are text.
Offsets = dict[str, dict[str, int]]
#: The key of a topic's epoch, next to its partition numbers: {"orders": {"epoch": 2, "0": 17, "1": 5}}. An adopted
#: topic restarts at offset 0 in a new epoch, so offsets alone do not identify the records.
EPOCH = "epoch"
#: The key of a checksum of the topic's id in the log, next to its epoch: a topic that was deleted and created again is
#: in its first epoch again.
TOPIC_ID = "topic_id"
#: Consecutive records of one log partition: topic, partition, records.
RecordRun = tuple[str, int, list[Record]]
Reader = TypeVar("Reader", DataFrameReader, DataStreamReader)


# DataFrames


def stream_records(spark: SparkSession, settings: Settings, starts: Offsets, *, records_max: int) -> DataFrame:
    """Return a stream of the records from `starts`, with at most `records_max` per micro-batch."""
    if _is_embedded(settings):
        return _embedded(spark, spark.readStream, settings, starts).option("recordsMax", str(records_max)).load()
    return _columns(_kafka(spark.readStream, settings, starts).option("maxOffsetsPerTrigger", str(records_max)).load())


def read_records(spark: SparkSession, settings: Settings, starts: Offsets, stops: Offsets) -> DataFrame:
    """Return the records with starts ≤ offset < stops."""
    if _is_embedded(settings):
        return _embedded(spark, spark.read, settings, starts).option("stops", _json(stops)).load()
    return _columns(_kafka(spark.read, settings, starts).option("endingOffsets", _json(stops)).load())


def coalesce_to_cores(spark: SparkSession, records: DataFrame) -> DataFrame:
    """In local mode, merge partitions into one task per core; each task replicates its log partitions concurrently."""
    context = spark.sparkContext
    return records.coalesce(context.defaultParallelism) if str(context.master).startswith("local") else records


def _is_embedded(settings: Settings) -> bool:
    url = settings.section("log").url
    if url is not None and scheme(url) != "kafka":
        raise InvalidInput(f"[log] url: the pipeline cannot read {scheme(url)}://")
    return url is None


def _embedded(spark: SparkSession, reader: Reader, settings: Settings, starts: Offsets) -> Reader:
    spark.dataSource.register(RecordsSource)
    return reader.format(NAME).option("settings", settings_to_json(settings)).option("starts", _json(starts))


def _kafka(reader: Reader, settings: Settings, starts: Offsets) -> Reader:
    reader = reader.format("kafka")
    for name, value in {**kafka_client_options(settings), **KAFKA_TUNING}.items():
        reader = reader.option(f"kafka.{name}", value)
    # Partitions are assigned explicitly: a topic's partition count is fixed in its configuration.
    assigned = {topic: [int(number) for number in numbers] for topic, numbers in starts.items()}
    return (
        reader.option("assign", _json(assigned))
        .option("startingOffsets", _json(starts))
        .option("failOnDataLoss", "true")
    )


def _columns(found: DataFrame) -> DataFrame:
    at = unix_millis(col("timestamp")).alias("timestamp_ms")
    return found.select("topic", "partition", "offset", at, "key", "value")


def _json(offsets: Any) -> str:
    return msgspec.json.encode(offsets).decode()


# The source of the embedded log


class RecordsSlice(InputPartition):
    """A range of one log partition, start ≤ offset < stop; `identity` is the topic's epoch and, if known, id."""

    def __init__(self, topic: str, partition: int, start: int, stop: int, identity: Mapping[str, int]) -> None:
        self.topic = topic
        self.partition = partition
        self.start = start
        self.stop = stop
        self.identity = dict(identity)


def epoch_of(numbers: Mapping[str, int]) -> int:
    """Return the epoch of a topic's offsets; offsets without one belong to the first epoch."""
    return numbers.get(EPOCH, FIRST_EPOCH)


def partition_offsets(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return a topic's offsets by partition, without their identity."""
    return {number: offset for number, offset in numbers.items() if number not in (EPOCH, TOPIC_ID)}


def identity_of(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the epoch of a topic's offsets and, if known, the checksum of the topic's id."""
    return {EPOCH: epoch_of(numbers)} | {name: numbers[name] for name in (TOPIC_ID,) if name in numbers}


def topic_identity(config: TopicConfig) -> dict[str, int]:
    """Return the identity of a topic's current offsets."""
    return {EPOCH: config.epoch, TOPIC_ID: crc32(config.topic_id.encode())}


class RecordsSource(DataSource):
    """`format("tidebook_records")` with the options `settings` and `starts`.

    A table needs the option `stops` too, and a stream `recordsMax`.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> RecordsReader:
        return RecordsReader(self.options)

    def streamReader(self, schema: StructType) -> RecordsStream:
        return RecordsStream(self.options)


class RecordsReader(DataSourceReader):
    """Reads the records with `starts` ≤ offset < `stops`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._settings = options["settings"]
        self._starts: Offsets = msgspec.json.decode(options["starts"], type=Offsets)
        self._stops: Offsets = msgspec.json.decode(options["stops"], type=Offsets)

    def partitions(self) -> Sequence[InputPartition]:
        return slices_between(self._starts, self._stops)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_slice(self._settings, partition)


class RecordsStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams the records from the offsets in the option `starts`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._settings = options["settings"]
        self._starts: Offsets = msgspec.json.decode(options["starts"], type=Offsets)
        self._rows = int(options["recordsMax"])
        self._target: Offsets | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._starts

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ends(self._starts)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the log's end offsets within the limit."""
        ends = self._ends(start) if self._target is None else self._target
        if isinstance(limit, ReadAllAvailable):
            return ends
        return bound_offsets(start, ends, limit.max_rows if isinstance(limit, ReadMaxRows) else self._rows)

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the log's end offsets for Spark's progress reports.

        The starts are not checked: retention may drop them once they are replicated.
        """
        return self._ends(self._starts, check=False)

    def _ends(self, starts: Offsets, *, check: bool = True) -> Offsets:
        """Return the partitions' end offsets; with `check`, raise `LogLost` if the log begins after a start."""
        worker = SparkWorker.of(self._settings)

        async def ends() -> Offsets:
            log = await worker.log()
            found: Offsets = {topic: {} for topic in starts}
            for topic, numbers in starts.items():
                for number, start in numbers.items():
                    first = await log.start(topic, int(number)) if check else start
                    if first > start:
                        raise LogLost(topic=topic, partition=int(number), first=start, last=first - 1)
                    found[topic][number] = max(start, await log.end(topic, int(number)))
            return found

        return worker.run(ends())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return slices_between(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read_slice(self._settings, partition)


def slices_between(start: Offsets, end: Offsets) -> list[RecordsSlice]:
    """Return one slice for each partition that has records between `start` and `end`."""
    return [
        RecordsSlice(topic, int(number), start[topic][number], stop, identity_of(start[topic]))
        for topic, stops in end.items()
        for number, stop in partition_offsets(stops).items()
        if start[topic][number] < stop
    ]


def bound_offsets(start: Offsets, end: Offsets, rows: int) -> Offsets:
    """Return end offsets for at most about `rows` records after `start`, in proportion to each partition's backlog."""
    stops = {topic: partition_offsets(numbers) for topic, numbers in end.items()}
    total = sum(stop - start[topic][number] for topic in stops for number, stop in stops[topic].items())
    if total <= rows:
        return end
    return {
        topic: numbers
        | {
            # Rounded up, so that every partition with a backlog advances.
            number: start[topic][number] + -((start[topic][number] - stop) * rows // total)
            for number, stop in stops[topic].items()
        }
        for topic, numbers in end.items()
    }


def _read_slice(settings: str, slice_: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the records of a slice as Arrow batches; runs in a worker."""
    if not isinstance(slice_, RecordsSlice):  # Spark passes None if there are no partitions
        return
    worker = SparkWorker.of(settings)
    topic, partition, start, stop = slice_.topic, slice_.partition, slice_.start, slice_.stop

    async def page() -> RecordPage:
        return await read_page(await worker.log(), topic, partition, start=start, stop=stop, limit=PAGE_RECORDS)

    while start < stop:
        found = worker.run(page())
        start = found.next_offset
        if found.records:
            yield to_arrow(topic, partition, found.records)


# Arrow


def to_arrow(topic: str, partition: int, records: Sequence[Record]) -> pa.RecordBatch:
    """Return records of one log partition as one Arrow batch."""
    n = len(records)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(topic, pa.string()), n),
            pa.repeat(pa.scalar(partition, pa.int32()), n),
            pa.array([each.offset for each in records], pa.int64()),
            pa.array([each.timestamp_ms for each in records], pa.int64()),
            pa.array([each.key for each in records], pa.binary()),
            pa.array([each.value for each in records], pa.binary()),
        ],
        schema=_ARROW,
    )


def partition_runs(batch: pa.RecordBatch) -> Iterator[RecordRun]:
    """Yield the records of a batch as runs of consecutive rows of the same log partition."""
    topics, partitions, *columns = (column.to_pylist() for column in batch.columns)
    records = [Record(*row) for row in zip(*columns, strict=True)]
    start = 0
    for (topic, partition), rows in groupby(zip(topics, partitions, strict=True)):
        stop = start + sum(1 for _ in rows)
        yield topic, partition, records[start:stop]
        start = stop


def merge_slices(batches: Batches) -> Iterator[RecordRun]:
    """Yield the slices of a task's batches, merging runs of one partition that a batch boundary has cut in two.

    Two slices would write each head twice. A merged slice stays within the limits of one.
    """
    pending: RecordRun | None = None
    for batch in batches:
        for run in partition_runs(batch):
            if pending is not None and pending[:2] == run[:2] and _fit_together(pending[2], run[2]):
                pending = (*pending[:2], pending[2] + run[2])
                continue
            if pending is not None:
                yield pending
            pending = run
    if pending is not None:
        yield pending


def _fit_together(records: Sequence[Record], more: Sequence[Record]) -> bool:
    if len(records) + len(more) > SLICE_RECORDS_MAX:
        return False
    return value_bytes(records) + value_bytes(more) <= SLICE_VALUE_BYTES_MAX


def value_bytes(records: Iterable[Record]) -> int:
    """Return the total size of the records' values."""
    return sum(len(each.value or b"") for each in records)
