"""Regions of write-ahead logs as Spark tables, one task per range of offsets.

    spark.read.format("tidebook").option("book", "./data").option("wal", "metrics").option("region", 7).load()

Columns: region, table, seq, payload, payload_type, offset. Without `region` all regions of the namespace are read.
Reading claims no region, so the owners keep writing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.payload import TYPE_NAMES, encode_payload
from tidebook.log.port import Log
from tidebook.pipeline.arrow import arrow_schema
from tidebook.pipeline.source.options import WAL, Options, one_line_errors
from tidebook.pipeline.worker import SparkWorker
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.wal.mapping import PackedMapping, SeqOffsets
from tidebook.wal.meta import RegionMeta
from tidebook.wal.reading import Run, read_mapped
from tidebook.wal.record import WalEntry
from tidebook.wal.settings import WalSettings
from tidebook.wal.topics import RegionId, RegionTopics, namespace_name, region_id
from tidebook.wal.wal import Wal

SCHEMA = "region long, table long, seq long, payload binary, payload_type string, offset long"
#: The approximate size of the log range that one task reads.
SLICE_BYTES = 64 * 1024 * 1024


class RegionSlice(msgspec.Struct, frozen=True):
    """A range of offsets of one region, and its live entries by table."""

    region: int
    start: int
    stop: int
    mappings: dict[int, PackedMapping]


def plan_slices(
    region: int, meta: RegionMeta, mappings: Mapping[int, SeqOffsets], *, slice_bytes: int = SLICE_BYTES
) -> list[RegionSlice]:
    """Divide the entries of the mappings into slices of about equal size."""
    bounds = [(mapping.first_offset, mapping.last_offset) for mapping in mappings.values()]
    begin = min((first for first, _ in bounds if first is not None), default=None)
    last = max((last for _, last in bounds if last is not None), default=None)
    if begin is None or last is None:
        return []
    count = max(1, -(-meta.byte_index.bytes_from(begin) // slice_bytes))
    step = -(-(last + 1 - begin) // count)
    slices = []
    for start in range(begin, last + 1, step):
        offsets = range(start, min(start + step, last + 1))
        parts = {table: mapping.within(offsets=offsets) for table, mapping in mappings.items()}
        packed = {table: part.packed() for table, part in parts.items() if part}
        if packed:
            slices.append(RegionSlice(region, offsets.start, offsets.stop, packed))
    return slices


def read_slice(settings: str, namespace: str, wanted: RegionSlice) -> Iterator[pa.RecordBatch]:
    """Yield the entries of a slice as Arrow batches in log order; runs in a worker."""
    worker = SparkWorker.of(settings)
    for runs in worker.iterate(_pages(worker, namespace, wanted)):
        yield to_arrow(wanted.region, [entry for run in runs for entry in run])


def to_arrow(region: int, entries: Sequence[WalEntry]) -> pa.RecordBatch:
    """Return entries of a region as one Arrow batch."""
    payloads = [encode_payload(entry.payload) for entry in entries]
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(region, pa.int64()), len(entries)),
            pa.array([entry.table for entry in entries], pa.int64()),
            pa.array([entry.seq for entry in entries], pa.int64()),
            pa.array([data for _, data in payloads], pa.binary()),
            pa.array([TYPE_NAMES[kind] for kind, _ in payloads], pa.string()),
            pa.array([entry.offset for entry in entries], pa.int64()),
        ],
        schema=arrow_schema(SCHEMA),
    )


async def _pages(worker: SparkWorker, namespace: str, wanted: RegionSlice) -> AsyncIterator[list[Run]]:
    topics = RegionTopics(await worker.log(), namespace, RegionId(wanted.region), WalSettings())
    mappings = {table: SeqOffsets.unpacked(packed) for table, packed in wanted.mappings.items()}
    async for runs in read_mapped(topics, mappings, [(wanted.start, wanted.stop)]):
        yield runs


def open_wal(log: Log, namespace: str) -> Wal:
    """Open a namespace; its regions must be opened with `writable=False`."""
    return Wal(log, namespace, clock=SystemClock(), ids=RandomIds(), metrics=Metrics())


class RegionPartition(InputPartition):
    """The slice of one task."""

    def __init__(self, slice_: RegionSlice) -> None:
        self.slice = slice_


class RegionsReader(DataSourceReader):
    """Plans slices of the regions' current entries on the driver, and reads them in tasks."""

    def __init__(self, options: Mapping[str, str]) -> None:
        given = Options(options)
        given.check_names(WAL)
        namespace = given.text("wal")
        if namespace is None:
            raise InvalidInput("reading regions needs the option wal, the name of a namespace")
        self._namespace = namespace_name(namespace)
        self._settings = given.settings()
        self._region = _number(given, "region")
        self._table = _number(given, "table")

    def partitions(self) -> Sequence[InputPartition]:
        with one_line_errors():
            worker = SparkWorker.of(self._settings)
            slices = worker.run(self._plan(worker))
            return [RegionPartition(each) for each in slices]

    async def _plan(self, worker: SparkWorker) -> list[RegionSlice]:
        wal = open_wal(await worker.log(), self._namespace)
        slices: list[RegionSlice] = []
        regions = await wal.regions() if self._region is None else [self._region]
        if not regions:
            raise NotFound(f"there is no write-ahead log {self._namespace}: the log has no region of this namespace")
        for id in regions:
            region = await wal.open_region(id, writable=False)
            mappings = {
                table: table_meta.mapping
                for table, table_meta in region.meta.tables.items()
                if self._table is None or table == self._table
            }
            slices += plan_slices(id, region.meta, mappings)
        return slices

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RegionPartition):  # Spark passes None if there are no partitions
            return iter(())
        return read_slice(self._settings, self._namespace, partition.slice)


def _number(options: Options, name: str) -> int | None:
    text = options.text(name)
    if text is None:
        return None
    try:
        return region_id(int(text))
    except ValueError as error:
        raise InvalidInput(f"the option {name} must be a whole number, not {text!r}") from error
