"""Rebuild the store of a topic from its log, or its tag view from the journals in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidebook.core.errors import Corrupt, LogLost, NotFound, UnknownVersion
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH
from tidebook.core.record import read_record
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.settings import JournalSettings
from tidebook.pipeline.jobs.replicate import Replication
from tidebook.pipeline.jobs.verify import SPLITS_PER_CORE, Tell, VerifyResult, verify
from tidebook.pipeline.source.stream import read_records
from tidebook.pipeline.worker import SparkWorker
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.store.port import ScanSplit, StoreWriter, next_repair_revision
from tidebook.tags.rebuild import remove_stale_rows, write_journal
from tidebook.tags.settings import TagSettings
from tidebook.wiring.book import Book
from tidebook.wiring.settings import options_as, settings_to_json

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Iterator[pa.RecordBatch]]


def rebuild(
    spark: SparkSession, book: Book, portal: BlockingPortal, topic: str, *, tell: Tell = lambda difference: None
) -> VerifyResult:
    """Rebuild the store of a topic from its complete log.

    Raise `LogLost` if the log does not begin at offset 0, and `Corrupt` if it was adopted.
    """
    ends = portal.run(_complete_log(book, topic))
    config = portal.run(book.store.topic_config(topic))
    if config is None:
        _refuse_adopted(topic, _last_epoch(spark, book, topic, ends))
        config = portal.run(_create_config(book, topic))
    began = portal.run(_replicated(book, topic, config))
    if not began:
        _refuse_adopted(topic, config.epoch)
    done = verify(spark, book, portal, [topic], repair=True, tell=tell) if began else VerifyResult()
    Replication(spark, book, portal, topics=[topic]).run(once=True)
    last = verify(spark, book, portal, [topic])
    return msgspec.structs.replace(last, differences=done.differences, repaired=done.repaired)


async def _complete_log(book: Book, topic: str) -> dict[int, int]:
    """Return the end offsets of all partitions; raise `LogLost` if one does not begin at offset 0."""
    state = await book.log.topic(topic)
    if state is None:
        raise NotFound(f"topic {topic}: the log has no such topic")
    ends = {}
    for number in range(state.partitions):
        start = await book.log.start(topic, number)
        if start > 0:
            raise LogLost(
                topic=topic,
                partition=number,
                first=0,
                last=start - 1,
                remedy="a store can be rebuilt only from a complete log; 'tidebook pipeline verify --repair' repairs "
                "what the log still has, and leaves the rest as it is",
            )
        ends[number] = await book.log.end(topic, number)
    return ends


def _refuse_adopted(topic: str, epoch: int) -> None:
    """Raise `Corrupt` for an adopted topic, because its log does not hold the events of older epochs."""
    if epoch > FIRST_EPOCH:
        raise Corrupt(
            f"topic {topic}: its log was adopted (epoch {epoch}), and what the store had of older epochs is not in it: "
            "restore the store from a copy, and replicate from there"
        )


async def _create_config(book: Book, topic: str) -> TopicConfig:
    state = await book.log.topic(topic)
    assert state is not None
    settings: JournalSettings = options_as(book.settings.section("journal"), "journal", JournalSettings)
    return await book.store.set_topic_config(
        topic, settings.topic_config(state.topic_id, state.partitions), expected=None
    )


async def _replicated(book: Book, topic: str, config: TopicConfig) -> bool:
    return any([await book.store.pointer(topic, number) is not None for number in range(config.partitions)])


def _last_epoch(spark: SparkSession, book: Book, topic: str, ends: dict[int, int]) -> int:
    """Return the newest epoch in the log's records, for a topic whose configuration the store has lost."""
    stops = {topic: {str(number): end for number, end in ends.items()}}
    starts = {topic: {str(number): 0 for number in ends}}
    found = read_records(spark, book.settings, starts, stops).mapInArrow(epochs, "epoch int").collect()
    return max([1, *(int(row["epoch"]) for row in found)])


def epochs(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Yield the newest epoch of the records; a function for `mapInArrow`."""
    newest = 1
    for batch in batches:
        for value in batch.column("value").to_pylist():
            try:
                newest = max(newest, getattr(read_record(value, limit_bytes=2**31), "epoch", 1))
            except UnknownVersion:
                continue
    yield pa.RecordBatch.from_pydict({"epoch": pa.array([newest], pa.int32())})


# ---- tag views


class RebuiltTags(msgspec.Struct, frozen=True):
    """How many tag rows a rebuild wrote, and how many it removed."""

    written: int
    removed: int


def rebuild_tags(spark: SparkSession, book: Book, portal: BlockingPortal, topic: str) -> RebuiltTags:
    """Rewrite the tag rows of a topic from its journals in the store, and remove rows without an event.

    As in `book.tags.rebuild`, rows of deleted and purged events stay if the settings keep them.
    """
    config = portal.run(book.store.topic_config(topic))
    if config is None:
        raise NotFound(f"topic {topic}: the store has nothing of it")
    rev = portal.run(next_repair_revision(book.store, [topic]))
    tasks = spark.sparkContext.defaultParallelism * SPLITS_PER_CORE
    splits = portal.run(book.store.splits(topic, count=tasks))
    settings = settings_to_json(book.settings)
    parts = spark.sparkContext.parallelize([(each.low, each.high) for each in splits], len(splits))
    written = _sum_rows(spark.createDataFrame(parts, "low string, high string"), tag_task(settings, topic, config, rev))
    tags = portal.run(_all_tags(book.store))
    if not tags:
        return RebuiltTags(written, 0)
    clear = options_as(book.settings.section("tags"), "tags", TagSettings).deletes == "follow"
    names = spark.sparkContext.parallelize([(tag,) for tag in tags], min(tasks, len(tags)))
    removed = _sum_rows(spark.createDataFrame(names, "tag string"), stale_task(settings, topic, rev, clear=clear))
    return RebuiltTags(written, removed)


async def _all_tags(store: StoreWriter) -> list[str]:
    return [tag async for tag in store.tags()]


def _sum_rows(rows: DataFrame, task: Task) -> int:
    return sum(int(row["rows"]) for row in rows.mapInArrow(task, "rows long").collect())


def stale_task(settings: str, topic: str, rev: int, *, clear: bool) -> Task:
    """Return a function for `mapInArrow` over (tag) that removes tag rows without an event in the topic."""

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        worker = SparkWorker.of(settings)
        removed = 0
        for batch in batches:
            for tag in batch.column("tag").to_pylist():
                removed += worker.run(_remove(worker, tag))
        yield pa.RecordBatch.from_pydict({"rows": pa.array([removed], pa.int64())})

    async def _remove(worker: SparkWorker, tag: str) -> int:
        return await remove_stale_rows(await worker.store(), tag, topic, rev=rev, clear=clear)

    return run


def tag_task(settings: str, topic: str, config: TopicConfig, rev: int) -> Task:
    """Return a function for `mapInArrow` over (low, high) that writes the tag rows of splits of the store."""
    sent = msgspec.json.encode(config)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        known = msgspec.json.decode(sent, type=TopicConfig)
        worker = SparkWorker.of(settings)
        written = 0
        for batch in batches:
            for row in batch.to_pylist():
                split = ScanSplit(row["low"], row["high"])
                written += worker.run(_write_tags(worker, topic, known, split, rev))
        yield pa.RecordBatch.from_pydict({"rows": pa.array([written], pa.int64())})

    return run


async def _write_tags(worker: SparkWorker, topic: str, config: TopicConfig, split: ScanSplit, rev: int) -> int:
    store = await worker.store()
    written = 0
    async for page in store.heads_in(topic, split):
        for id, head in page:
            if head.live and head.tag_counts:
                written += await write_journal(store, Key(topic, id), config, rev=rev)
    return written
