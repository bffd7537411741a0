"""Export events to Parquet or Delta by topic and day, incrementally and exactly once.

The target stores the exported offsets: in a numbered manifest next to the Parquet files, or in the commit of the Delta
table that added the rows. Each run starts from them with a temporary checkpoint.

OUTPUT/topic=orders/day=2026-01-31/000000000012-0-….parquet      committed files
OUTPUT/_tidebook/export/000000000012.json                        the manifests; the last one is current
OUTPUT/_tidebook/staging/…                                       uncommitted files
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, count, to_date
from pyspark.sql.functions import max as greatest

from tidebook.core.errors import Conflict, Corrupt, InvalidInput, TidebookError
from tidebook.core.replication_plan import first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.errors import failure_of
from tidebook.pipeline.jobs.flush_wal import STAGING, commit, output_folder, sweep_staging
from tidebook.pipeline.session import local_uri
from tidebook.pipeline.source.format import NAME, register
from tidebook.pipeline.source.records import EPOCH, TOPIC_ID, Offsets, epoch_of, topic_identity
from tidebook.replication.status import topic_configs
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wal.flush import VERSION, FolderManifest, Manifest, Move
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

RECORDS_MAX = 500_000
PARTITIONED_BY = ("topic", "day")


class ExportProgress(msgspec.Struct, frozen=True):
    """The totals of a run so far, or of a whole run."""

    batches: int
    events: int
    seconds: float
    #: The next offsets, by topic and partition, and each topic's identity.
    offsets: Offsets


def export(
    spark: SparkSession,
    book: Book,
    portal: BlockingPortal,
    output: str | Path,
    *,
    topics: Sequence[str] = (),
    table_format: str = "parquet",
    records_max: int = RECORDS_MAX,
    report: Callable[[ExportProgress], None] = lambda exported: None,
) -> ExportProgress:
    """Export the events that are replicated and not exported yet; call `report` after each batch."""
    register(spark)
    target = _open_target(spark, output, table_format)
    began = time.monotonic()
    batches = events = 0

    def add(batch: DataFrame, offsets: Offsets | None = None) -> None:
        nonlocal batches, events
        added = target.add(batch.withColumn("day", to_date(col("timestamp"))), offsets)
        batches, events = batches + 1, events + added
        report(ExportProgress(batches, events, time.monotonic() - began, target.reached()))

    configs = portal.run(topic_configs(book.store, topics))
    spans = portal.run(_spans(book, configs, target.reached()))
    for topic, span in spans.items():
        if span.in_log:
            continue
        stops = {topic: {name: number for name, number in span.stops.items() if name != TOPIC_ID}}
        scan = spark.read.format(NAME).options(**_options(book, {topic: span.starts}), freshness="store")
        add(scan.option("endingOffsets", msgspec.json.encode(stops).decode()).load(), {topic: span.stops})
    followed = {topic: span.starts for topic, span in spans.items() if span.in_log}
    if followed:
        stream = spark.readStream.format(NAME).options(**_options(book, followed))
        _run(stream.option("maxRecordsPerTrigger", str(records_max)).load(), lambda batch, number: add(batch))
    return ExportProgress(batches, events, time.monotonic() - began, target.reached())


class Span(msgspec.Struct, frozen=True):
    """The range of a topic to export: starts ≤ position < stops, by partition.

    Stops include the topic's identity. Starts include their epoch; if the topic was never exported they have none, and
    the range includes all epochs in the store.
    """

    starts: dict[str, int]
    stops: dict[str, int]
    #: Whether to stream from the log; the store is scanned at the first export, after an adopt, and if the log has
    #: lost a part of the range.
    in_log: bool


async def _spans(book: Book, configs: Mapping[str, TopicConfig], reached: Offsets) -> dict[str, Span]:
    spans: dict[str, Span] = {}
    for topic, each in configs.items():
        before, identity = reached.get(topic), topic_identity(each)
        if (
            before is not None
            and epoch_of(before) == each.epoch
            and before.get(TOPIC_ID) not in (None, identity[TOPIC_ID])
        ):
            before = None  # the topic was deleted and created again, and all of its events are new
        epoch = each.epoch if before is None else epoch_of(before)
        if epoch > each.epoch:
            raise Corrupt(
                f"topic {topic}: the target was filled from epoch {epoch}, and the store is in epoch {each.epoch}: "
                "restore a newer backup of the store, or export to another path"
            )
        starts = {str(number): (before or {}).get(str(number), 0) for number in range(each.partitions)}
        stops = await _replicated(book, topic, each)
        if epoch == each.epoch:
            stops = {number: max(start, stops[number]) for number, start in starts.items()}
            if stops == starts:
                continue
        in_log = before is not None and epoch == each.epoch and await _in_log(book, topic, each, starts, stops)
        if before is not None:
            starts = {EPOCH: epoch} | starts
        spans[topic] = Span(starts, identity | stops, in_log)
    return spans


async def _replicated(book: Book, topic: str, config: TopicConfig) -> dict[str, int]:
    """Return the first unreplicated offset of each partition."""
    pointers = await book.store.pointers(topic)
    return {
        str(number): first_unreplicated_offset(pointers.get(number), topic, number, config)
        for number in range(config.partitions)
    }


async def _in_log(
    book: Book, topic: str, config: TopicConfig, starts: Mapping[str, int], stops: Mapping[str, int]
) -> bool:
    """Return whether the log holds these offsets and is the one that the store was filled from."""
    state = await book.log.topic(topic)
    if state is None or state.topic_id != config.topic_id:
        return False
    for number, start in starts.items():
        if await book.log.start(topic, int(number)) > start or await book.log.end(topic, int(number)) < stops[number]:
            return False
    return True


def _options(book: Book, starts: Offsets) -> dict[str, str]:
    return {
        "settings": settings_to_json(book.settings),
        "topic": ",".join(starts),
        "startingOffsets": msgspec.json.encode(starts).decode(),
    }


def _run(stream: DataFrame, each_batch: Callable[[DataFrame, int], None]) -> None:
    failed: list[TidebookError] = []

    def guarded(batch: DataFrame, number: int) -> None:
        try:
            each_batch(batch, number)
        except TidebookError as error:
            failed.append(error)  # Spark would only report its text
            raise

    scratch = Path(tempfile.mkdtemp(prefix="tidebook-export-"))
    try:
        writer = stream.writeStream.foreachBatch(guarded).option("checkpointLocation", local_uri(scratch))
        writer.trigger(availableNow=True).start().awaitTermination()
    except Exception as error:
        raise failed[0] if failed else failure_of(error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _open_target(spark: SparkSession, output: str | Path, table_format: str) -> ParquetTarget | DeltaTarget:
    """Open the destination of an export, which commits a batch and the offsets after it atomically."""
    if table_format == "parquet":
        return ParquetTarget(spark, output_folder(output))
    if table_format == "delta":
        return DeltaTarget(spark, str(output))
    raise InvalidInput(f"the format of an export must be parquet or delta, not {table_format}")


class ExportManifest(Manifest, frozen=True):
    """A manifest of an export, with the next offsets after its files."""

    offsets: Offsets = msgspec.field(default_factory=dict)


class ParquetTarget:
    """Writes staged files with Spark, commits them in a manifest and publishes them by renaming."""

    def __init__(self, spark: SparkSession, output: Path) -> None:
        self._spark = spark
        self._output = output
        self._manifest = FolderManifest(output, "export", ExportManifest)
        self._manifest.publish()
        self._base = self._manifest.last()

    def reached(self) -> Offsets:
        """Return the next offsets after the last committed batch."""
        return self._base.offsets

    def add(self, events: DataFrame, offsets: Offsets | None = None) -> int:
        """Write and commit a batch; return its number of events. `offsets` defaults to those after its last events."""
        number = self._base.number + 1
        staging = self._output / STAGING / f"export-{number}-{uuid4().hex}"
        events.write.partitionBy(*PARTITIONED_BY).parquet(local_uri(staging))
        files = sorted(staging.glob("topic=*/day=*/*.parquet"))
        if not files and offsets is None:
            shutil.rmtree(staging, ignore_errors=True)
            return 0
        added = 0
        following = self._base.offsets
        if files:
            following, added = _next_offsets(self._spark.read.parquet(local_uri(staging)), following)
        moves = tuple(
            Move(
                str(file.relative_to(self._output)),
                f"{file.parent.relative_to(staging)}/{number:012}-{i}-{uuid4().hex[:8]}.parquet",
            )
            for i, file in enumerate(files)
        )
        commit(self._manifest, ExportManifest(VERSION, number, moves, following | (offsets or {})))
        self._base = self._manifest.last()
        sweep_staging(self._output, "export", number)
        return added


class DeltaTarget:
    """A Delta table; one commit adds a batch's rows, its offsets and its number."""

    APP = "tidebook-export"

    def __init__(self, spark: SparkSession, output: str) -> None:
        self._spark = spark
        self._output = output
        self._number, self._offsets = self._last()

    def reached(self) -> Offsets:
        """Return the next offsets after the last committed batch."""
        return self._offsets

    def add(self, events: DataFrame, offsets: Offsets | None = None) -> int:
        """Write and commit a batch, as `ParquetTarget.add`."""
        persisted = events.persist()
        try:
            following, added = _next_offsets(persisted, self._offsets)
            if not added and offsets is None:
                return 0
            number, following = self._number + 1, following | (offsets or {})
            self._save(persisted, number, following)
        finally:
            persisted.unpersist()
        # Delta silently ignores a transaction whose number is already used.
        found = self._last()
        if found != (number, following):
            raise self._overtaken(found[0])
        self._number, self._offsets = found
        return added

    def _save(self, events: DataFrame, number: int, offsets: Offsets) -> None:
        mark = {"tidebook": number, "offsets": offsets}
        try:
            (
                events.write.format("delta")
                .mode("append")
                .partitionBy(*PARTITIONED_BY)
                .option("mergeSchema", "true")  # a table of an older version has fewer columns
                .option("txnAppId", self.APP)
                .option("txnVersion", str(number))
                .option("userMetadata", msgspec.json.encode(mark).decode())
                .save(self._output)
            )
        except Exception as error:
            if "ConcurrentTransaction" in str(error) or "DELTA_CONCURRENT_TRANSACTION" in str(error):
                raise self._overtaken(number) from error
            raise

    def _overtaken(self, found: int) -> Conflict:
        remedy = "another export has committed in between: run the export again"
        return Conflict(key=self._output, expected=self._number, found=found, counted="export", remedy=remedy)

    def _last(self) -> tuple[int, Offsets]:
        """Return the number and offsets of the newest export's commit; other programs may have committed after it."""
        path = self._spark._jvm.org.apache.hadoop.fs.Path(self._output, "_delta_log")  # type: ignore[union-attr]
        if not path.getFileSystem(self._spark._jsc.hadoopConfiguration()).exists(path):
            return 0, {}
        history = self._spark.sql(f"DESCRIBE HISTORY delta.`{self._output}`")
        found = history.where("userMetadata like '{\"tidebook\":%'").orderBy(col("version").desc()).first()
        if found is None:
            raise InvalidInput(f"{self._output} is a Delta table that was not created by an export: use another path")
        mark = msgspec.json.decode(found["userMetadata"])
        return int(mark["tidebook"]), mark["offsets"]


def _next_offsets(events: DataFrame, before: Offsets) -> tuple[Offsets, int]:
    """Return the next offsets after these events, and their count. A record's events are always in one batch."""
    found = (
        events.groupBy("topic", "partition").agg(greatest("offset").alias("last"), count("*").alias("events")).collect()
    )
    offsets = {topic: dict(numbers) for topic, numbers in before.items()}
    for row in found:
        offsets.setdefault(row["topic"], {})[str(row["partition"])] = row["last"] + 1
    return offsets, sum(int(row["events"]) for row in found)
