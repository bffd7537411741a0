"""Flush WAL entries to Parquet exactly once, one folder per table, sorted by number; then mark them deleted.

OUTPUT/region=7/table=1/INCARNATION-FIRST-LAST-N.parquet  committed files
OUTPUT/_tidebook/region=7/000000000012.json                the manifests; the last one is current
OUTPUT/_tidebook/staging/…                                 uncommitted files
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.arrow import Batches
from tidebook.pipeline.errors import failure_of
from tidebook.pipeline.session import local_uri
from tidebook.pipeline.source.regions import SCHEMA, RegionSlice, open_wal, plan_slices, read_slice
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.secret import split_url
from tidebook.wal.flush import (
    VERSION,
    Commit,
    Flushed,
    FolderManifest,
    M,
    Move,
    Range,
    TableIncarnation,
    flush_region,
    next_commit,
)
from tidebook.wal.region import Region
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

STAGING = "_tidebook/staging"


def flush_wal(
    spark: SparkSession,
    book: Book,
    portal: BlockingPortal,
    *,
    namespace: str,
    output: str | Path,
    regions: Sequence[int] = (),
    report: Callable[[Flushed], None] = lambda flushed: None,
) -> list[Flushed]:
    """Flush the given regions of a namespace, or all; return the result of each region."""
    folder = output_folder(output)

    async def flush_all() -> list[Flushed]:
        wal = open_wal(book.log, namespace)
        done = []
        for id in regions or await wal.regions():
            region = await wal.open_region(id, writable=False)
            sink = ParquetSink(spark, settings_to_json(book.settings), namespace, region, folder)
            done.append(await flush_region(region, sink))
            report(done[-1])
        await wal.close()
        return done

    return portal.run(flush_all())


def output_folder(output: str | Path) -> Path:
    """Return the folder of a path or a file: URL, which every worker must have mounted at the same path."""
    parts = split_url(str(output), "the folder")
    if parts.scheme not in ("", "file"):
        raise InvalidInput(f"{parts.scheme}:// is not supported: use a folder that all workers share")
    return Path(parts.path).resolve()


class ParquetSink:
    """Writes staged files with Spark, commits them in a manifest and publishes them by renaming."""

    def __init__(self, spark: SparkSession, settings: str, namespace: str, region: Region, output: Path) -> None:
        self._spark = spark
        self._settings = settings
        self._namespace = namespace
        self._region = region.id
        self._source = f"{namespace}/{region.id}/{region.topic_id}"
        self._output = output
        self._manifest = FolderManifest(output, f"region={region.id}", Commit)
        #: The manifest from which the ranges are planned; the commit conflicts if another one has followed it.
        self._base = Commit(VERSION, 0)

    async def committed(self) -> Mapping[TableIncarnation, int]:
        """Publish the last manifest and return the committed number of each table."""
        return await asyncio.to_thread(self._published)

    def _published(self) -> dict[TableIncarnation, int]:
        self._manifest.publish()
        last = self._manifest.last()
        if last.number and last.source != self._source:
            raise InvalidInput(
                f"{self._output} contains the entries of {last.source}, not of {self._source}: "
                "use a separate folder for each namespace, and for a region that was created again"
            )
        self._base = msgspec.structs.replace(last, source=self._source)
        return self._base.committed

    async def stage(self, region: Region, ranges: Sequence[Range]) -> Sequence[str]:
        """Read the ranges in Spark tasks and write them to a new staging folder; return the files."""
        meta = region.meta.frozen()
        mappings = {
            each.table: meta.tables[each.table].mapping.within(seqs=range(each.first, each.last + 1)) for each in ranges
        }
        slices = plan_slices(self._region, meta, mappings)
        return await asyncio.to_thread(self._write, slices, len(ranges))

    def _write(self, slices: Sequence[RegionSlice], tables: int) -> list[str]:
        staging = self._output / STAGING / f"{self._region}-{self._base.number}-{uuid4().hex}"
        entries = read_slices(self._spark, self._settings, self._namespace, slices)
        width = min(tables, self._spark.sparkContext.defaultParallelism * 4)
        by_table = entries.repartition(width, "table").sortWithinPartitions("table", "seq").drop("region")
        try:
            by_table.write.partitionBy("table").parquet(local_uri(staging))
        except Exception as error:
            raise failure_of(error) from error
        return [str(path.relative_to(self._output)) for path in sorted(staging.glob("table=*/*.parquet"))]

    async def commit(self, ranges: Sequence[Range], files: Sequence[str]) -> None:
        """Commit all ranges atomically in a manifest, then publish their files."""
        await asyncio.to_thread(self._commit, ranges, files)

    def _commit(self, ranges: Sequence[Range], files: Sequence[str]) -> None:
        by_table = {each.table: each for each in ranges}
        counts: dict[int, int] = {}
        moves = []
        for file in files:
            table = int(Path(file).parent.name.removeprefix("table="))
            each = by_table[table]
            number = counts[table] = counts.get(table, -1) + 1
            name = f"{each.incarnation}-{each.first}-{each.last}-{number}.parquet"
            moves.append(Move(file, f"region={self._region}/table={table}/{name}"))
        commit(self._manifest, next_commit(self._base, ranges, moves))
        sweep_staging(self._output, str(self._region), self._base.number)


def commit(manifests: FolderManifest[M], manifest: M) -> None:
    """Commit a manifest and publish its files."""
    manifests.add(manifest)
    manifests.publish()
    manifests.prune()


def sweep_staging(output: Path, name: str, number: int) -> None:
    """Remove the staging folders of this and earlier commits; the commit of a job that still uses one conflicts."""
    for folder in (output / STAGING).glob(f"{name}-*-*"):
        if int(folder.name.split("-")[1]) <= number:
            shutil.rmtree(folder, ignore_errors=True)


def read_slices(spark: SparkSession, settings: str, namespace: str, slices: Sequence[RegionSlice]) -> DataFrame:
    """Return the entries of slices as a DataFrame, read by one task per slice."""
    rows = [(number, msgspec.msgpack.encode(each)) for number, each in enumerate(slices)]
    plan = spark.createDataFrame(rows, "number long, slice binary").repartitionByRange(max(1, len(rows)), "number")

    def task(batches: Batches) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for data in batch.column("slice").to_pylist():
                yield from read_slice(settings, namespace, msgspec.msgpack.decode(data, type=RegionSlice))

    return plan.mapInArrow(task, SCHEMA)
