"""Rebuild: the store of a topic from its log, or the tag views from the journals that the store has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidebook.core.errors import Corrupt, LogLost, NotFound, UnknownVersion
from tidebook.core.key import Key
from tidebook.core.portal import Portal
from tidebook.core.position import FIRST_EPOCH
from tidebook.core.record import read_record
from tidebook.core.topic import TopicFacts
from tidebook.journal.settings import JournalSettings
from tidebook.pipeline.jobs.replicate import Replication
from tidebook.pipeline.jobs.verify import SPLITS_PER_CORE, Tell, Verified, verify
from tidebook.pipeline.source.stream import read_records
from tidebook.pipeline.worker import Worker
from tidebook.store.port import Split, StoreWriter
from tidebook.store.revision import next_rev
from tidebook.tags.rebuild import remove_stale, write_journal
from tidebook.tags.settings import TagSettings
from tidebook.wiring.book import Book
from tidebook.wiring.settings import options_as, settings_to_json

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Iterator[pa.RecordBatch]]


def rebuild(
    spark: SparkSession, book: Book, portal: Portal, topic: str, *, tell: Tell = lambda difference: None
) -> Verified:
    """Make the store of a topic what its whole log says. Refused where the log is not whole, or was adopted."""
    ends = portal.run(_whole_log(book, topic))
    facts = portal.run(book.store.facts(topic))
    if facts is None:
        _refuse_later(topic, _last_epoch(spark, book, topic, ends))
        facts = portal.run(_make_facts(book, topic))
    began = portal.run(_replicated(book, topic, facts))
    if not began:
        _refuse_later(topic, facts.epoch)
    done = verify(spark, book, portal, [topic], repair=True, tell=tell) if began else Verified()
    Replication(spark, book, portal, topics=[topic]).run(once=True)
    last = verify(spark, book, portal, [topic])
    return msgspec.structs.replace(last, differences=done.differences, mended=done.mended)


async def _whole_log(book: Book, topic: str) -> dict[int, int]:
    """The ends of all partitions; LogLost where one does not begin at its beginning."""
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
                remedy="a store is rebuilt from a whole log alone; 'tidebook pipeline verify --repair' mends what "
                "the log still has, and leaves the rest as it is",
            )
        ends[number] = await book.log.end(topic, number)
    return ends


def _refuse_later(topic: str, epoch: int) -> None:
    """What was in the store before an adopt is not in the log, and what the log has of it would count as later."""
    if epoch > FIRST_EPOCH:
        raise Corrupt(
            f"topic {topic}: its log was adopted (epoch {epoch}), and what the store had of older epochs is not in it: "
            "restore the store from a copy, and replicate from there"
        )


async def _make_facts(book: Book, topic: str) -> TopicFacts:
    state = await book.log.topic(topic)
    assert state is not None
    settings: JournalSettings = options_as(book.settings.section("journal"), "journal", JournalSettings)
    return await book.store.set_facts(topic, settings.facts(state.topic_id, state.partitions), expected=None)


async def _replicated(book: Book, topic: str, facts: TopicFacts) -> bool:
    return any([await book.store.pointer(topic, number) is not None for number in range(facts.partitions)])


def _last_epoch(spark: SparkSession, book: Book, topic: str, ends: dict[int, int]) -> int:
    """The newest epoch that a record of the log speaks of: where the store's facts are lost, the log tells it."""
    stops = {topic: {str(number): end for number, end in ends.items()}}
    starts = {topic: {str(number): 0 for number in ends}}
    found = read_records(spark, book.settings, starts, stops).mapInArrow(epochs, "epoch int").collect()
    return max([1, *(int(row["epoch"]) for row in found)])


def epochs(batches: Batches) -> Iterator[pa.RecordBatch]:
    """A function for `mapInArrow`: the newest epoch of the records."""
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
    """How many tag rows a rebuild wrote, and how many it took away."""

    written: int
    removed: int


def rebuild_tags(spark: SparkSession, book: Book, portal: Portal, topic: str) -> RebuiltTags:
    """Write the tag rows of a topic again from its journals in the store, and remove those that no journal speaks of.

    As `book.tags.rebuild` does for one tag: rows of deleted and purged events stay where the settings keep them.
    """
    facts = portal.run(book.store.facts(topic))
    if facts is None:
        raise NotFound(f"topic {topic}: the store has nothing of it")
    rev = portal.run(next_rev(book.store, [topic]))
    tasks = spark.sparkContext.defaultParallelism * SPLITS_PER_CORE
    splits = portal.run(book.store.splits(topic, count=tasks))
    settings = settings_to_json(book.settings)
    parts = spark.sparkContext.parallelize([(each.low, each.high) for each in splits], len(splits))
    written = _summed(spark.createDataFrame(parts, "low string, high string"), tag_task(settings, topic, facts, rev))
    tags = portal.run(_listed(book.store))
    if not tags:
        return RebuiltTags(written, 0)
    clear = options_as(book.settings.section("tags"), "tags", TagSettings).deletes == "follow"
    names = spark.sparkContext.parallelize([(tag,) for tag in tags], min(tasks, len(tags)))
    removed = _summed(spark.createDataFrame(names, "tag string"), stale_task(settings, topic, rev, clear=clear))
    return RebuiltTags(written, removed)


async def _listed(store: StoreWriter) -> list[str]:
    return [tag async for tag in store.tags()]


def _summed(rows: DataFrame, task: Task) -> int:
    return sum(int(row["rows"]) for row in rows.mapInArrow(task, "rows long").collect())


def stale_task(settings: str, topic: str, rev: int, *, clear: bool) -> Task:
    """A function for `mapInArrow` over (tag): removes the tags' rows that no journal of the topic speaks of."""

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        worker = Worker.of(settings)
        removed = 0
        for batch in batches:
            for tag in batch.column("tag").to_pylist():
                removed += worker.run(_remove(worker, tag))
        yield pa.RecordBatch.from_pydict({"rows": pa.array([removed], pa.int64())})

    async def _remove(worker: Worker, tag: str) -> int:
        return await remove_stale(await worker.store(), tag, topic, rev=rev, clear=clear)

    return run


def tag_task(settings: str, topic: str, facts: TopicFacts, rev: int) -> Task:
    """A function for `mapInArrow` over (low, high): writes the tag rows of parts of the store."""
    sent = msgspec.json.encode(facts)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        known = msgspec.json.decode(sent, type=TopicFacts)
        worker = Worker.of(settings)
        written = 0
        for batch in batches:
            for row in batch.to_pylist():
                split = Split(row["low"], row["high"])
                written += worker.run(_write_tags(worker, topic, known, split, rev))
        yield pa.RecordBatch.from_pydict({"rows": pa.array([written], pa.int64())})

    return run


async def _write_tags(worker: Worker, topic: str, facts: TopicFacts, split: Split, rev: int) -> int:
    store = await worker.store()
    written = 0
    async for page in store.heads_in(topic, split):
        for id, head in page:
            if head.live and head.tag_counts:
                written += await write_journal(store, Key(topic, id), facts, rev=rev)
    return written
