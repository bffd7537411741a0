"""Log records as a Spark source through the log port, one Spark partition per log partition.

It reads the embedded log; Kafka is read with Spark's own connector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tidebook.core.errors import InvalidInput, LogLost
from tidebook.log.port import RecordPage, read_page
from tidebook.pipeline.records import SCHEMA, to_arrow
from tidebook.pipeline.worker import SparkWorker

NAME = "tidebook_records"
PAGE_RECORDS = 10_000
RECORDS_MAX = 500_000

#: The next offset to read, by topic and partition. Spark stores it as JSON, so partition numbers are text.
Offsets = dict[str, dict[str, int]]


class RecordsSlice(InputPartition):
    """A range of one log partition: start ≤ offset < stop."""

    def __init__(self, topic: str, partition: int, start: int, stop: int) -> None:
        self.topic = topic
        self.partition = partition
        self.start = start
        self.stop = stop


class RecordsSource(DataSource):
    """`spark.readStream.format("tidebook_records")`, with the options `settings`, `starts` and `recordsMax`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> RecordsReader:
        return RecordsReader(dict(self.options))

    def streamReader(self, schema: StructType) -> RecordsStream:
        return RecordsStream(dict(self.options))


class RecordsReader(DataSourceReader):
    """Reads the records with `starts` ≤ offset < `stops`."""

    def __init__(self, options: dict[str, str]) -> None:
        given = {name.lower(): value for name, value in options.items()}
        self._settings = given["settings"]
        self._starts: Offsets = msgspec.json.decode(given["starts"], type=Offsets)
        self._stops: Offsets = msgspec.json.decode(given["stops"], type=Offsets)

    def partitions(self) -> Sequence[InputPartition]:
        return slices_between(self._starts, self._stops)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self._settings, partition)


class RecordsStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams the records from the offsets in the option `starts`."""

    def __init__(self, options: dict[str, str]) -> None:
        given = {name.lower(): value for name, value in options.items()}
        try:
            self._settings = given["settings"]
            self._starts: Offsets = msgspec.json.decode(given["starts"], type=Offsets)
        except KeyError as error:
            raise InvalidInput(f"a stream of records needs the option {error}") from error
        self._rows = int(given.get("recordsmax", RECORDS_MAX))
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

    def _ends(self, of: Offsets, *, check: bool = True) -> Offsets:
        """Return the partitions' end offsets; with `check`, raise `LogLost` if the log begins after a start."""
        worker = SparkWorker.of(self._settings)

        async def ends() -> Offsets:
            log = await worker.log()
            found: Offsets = {}
            for topic, starts in of.items():
                found[topic] = {}
                for number, start in starts.items():
                    first = await log.start(topic, int(number)) if check else start
                    if first > start:
                        raise LogLost(topic=topic, partition=int(number), first=start, last=first - 1)
                    found[topic][number] = max(start, await log.end(topic, int(number)))
            return found

        return worker.run(ends())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return slices_between(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self._settings, partition)


def slices_between(start: Offsets, end: Offsets) -> list[RecordsSlice]:
    """Return one slice for each partition that has records between `start` and `end`."""
    return [
        RecordsSlice(topic, int(number), start[topic][number], stop)
        for topic, stops in end.items()
        for number, stop in stops.items()
        if start[topic][number] < stop
    ]


def read_slice(settings: str, slice_: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the records of a slice as Arrow batches; runs in a worker."""
    if not isinstance(slice_, RecordsSlice):  # Spark passes None if there are no partitions
        return
    worker = SparkWorker.of(settings)
    start = slice_.start
    while start < slice_.stop:
        page = worker.run(_read(worker, slice_, start))
        start = page.next_offset
        if page.records:
            yield to_arrow(slice_.topic, slice_.partition, page.records)


async def _read(worker: SparkWorker, slice_: RecordsSlice, start: int) -> RecordPage:
    log = await worker.log()
    return await read_page(log, slice_.topic, slice_.partition, start=start, stop=slice_.stop, limit=PAGE_RECORDS)


def bound_offsets(start: Offsets, end: Offsets, rows: int) -> Offsets:
    """Return end offsets for at most about `rows` records after `start`, in proportion to each partition's backlog."""
    waiting = {
        (topic, number): stop - start[topic][number] for topic, stops in end.items() for number, stop in stops.items()
    }
    total = sum(waiting.values())
    if total <= rows:
        return end
    return {
        topic: {
            # Rounded up, so that every partition with a backlog advances.
            number: start[topic][number] + -(-waiting[topic, number] * rows // total)
            for number in stops
        }
        for topic, stops in end.items()
    }
