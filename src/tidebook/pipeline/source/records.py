"""The embedded log as a Spark stream: one Spark partition a log partition, Arrow batches, bounded a trigger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from tidebook.core.errors import InvalidInput
from tidebook.log.port import Record
from tidebook.pipeline.worker import Worker

NAME = "tidebook_records"
SCHEMA = "topic string, partition int, offset long, timestamp_ms long, key binary, value binary"
ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)
BATCH_RECORDS = 10_000

#: Offsets of a stream: the next one to read, by topic and partition.
Offsets = dict[str, dict[str, int]]


class Slice(InputPartition):
    """Records of one log partition, start ≤ offset < stop."""

    def __init__(self, topic: str, partition: int, start: int, stop: int) -> None:
        self.topic = topic
        self.partition = partition
        self.start = start
        self.stop = stop


class RecordsSource(DataSource):
    """`spark.readStream.format("tidebook_records")`, with the options `settings`, `starts` and `maxRows`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> RecordsStream:
        return RecordsStream(dict(self.options))


class RecordsStream(DataSourceStreamReader):
    """Reads the log from where the job says the store stands."""

    def __init__(self, options: dict[str, str]) -> None:
        if "settings" not in options or "starts" not in options:
            raise InvalidInput("a stream of records needs the options settings and starts")
        self._settings = options["settings"]
        self._starts: Offsets = msgspec.json.decode(options["starts"], type=Offsets)
        self._rows = int(options.get("maxrows", options.get("maxRows", "500000")))

    def initialOffset(self) -> dict[str, Any]:
        return self._starts

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """As far as the logs reach, within the limit shared evenly by the partitions that have something."""
        ends = self._ends(start)
        if isinstance(limit, ReadAllAvailable):
            return ends
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._rows
        return bounded(start, ends, rows)

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._ends(self._starts)

    def _ends(self, of: Offsets) -> Offsets:
        worker = Worker.of(self._settings)

        async def ends() -> Offsets:
            log = await worker.log()
            return {topic: {number: await log.end(topic, int(number)) for number in all_} for topic, all_ in of.items()}

        return worker.run(ends())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [
            Slice(topic, int(number), start[topic][number], stop)
            for topic, stops in end.items()
            for number, stop in stops.items()
            if start[topic][number] < stop
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        assert isinstance(partition, Slice)
        worker = Worker.of(self._settings)
        start = partition.start
        while start < partition.stop:
            batch = worker.run(_read(worker, partition, start))
            start = batch.next_offset
            if batch.records:
                yield record_batch(partition.topic, partition.partition, batch.records)


async def _read(worker: Worker, slice_: Slice, start: int) -> Any:
    log = await worker.log()
    return await log.read(slice_.topic, slice_.partition, start=start, stop=slice_.stop, limit=BATCH_RECORDS)


def record_batch(topic: str, partition: int, records: Sequence[Record]) -> pa.RecordBatch:
    """Records as Arrow."""
    n = len(records)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([topic] * n, pa.string()),
            pa.array([partition] * n, pa.int32()),
            pa.array([each.offset for each in records], pa.int64()),
            pa.array([each.timestamp_ms for each in records], pa.int64()),
            pa.array([each.key for each in records], pa.binary()),
            pa.array([each.value for each in records], pa.binary()),
        ],
        schema=ARROW,
    )


def bounded(start: Offsets, ends: Offsets, rows: int) -> Offsets:
    """The ends, cut so that at most `rows` offsets lie between, the partitions sharing them evenly."""
    left = {(t, n): end - start[t][n] for t, all_ in ends.items() for n, end in all_.items() if end > start[t][n]}
    cut = {topic: dict(start[topic]) for topic in ends}
    while left and rows > 0:
        share = max(1, rows // len(left))
        for topic, number in list(left):
            taken = min(share, left[topic, number], rows)
            cut[topic][number] += taken
            rows -= taken
            left[topic, number] -= taken
            if left[topic, number] == 0:
                del left[topic, number]
    return cut
