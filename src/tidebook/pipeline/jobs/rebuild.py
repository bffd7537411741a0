"""Rebuild the store of a topic from its log, or its tag view from the journals in the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidebook.core.errors import Corrupt, LogLost, NotFound, UnknownVersion
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH
from tidebook.core.record import read_record
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.settings import JournalSettings
from tidebook.pipeline.arrow import Batches
from tidebook.pipeline.jobs.replicate import Replication
from tidebook.pipeline.jobs.verify import OnDifference, VerifyResult, all_tags, store_splits, verify
from tidebook.pipeline.source.records import read_records
from tidebook.pipeline.worker import SparkWorker
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.store.port import ScanSplit, StoreWriter, next_repair_revision
from tidebook.tags.rebuild import remove_stale_rows, write_journal
from tidebook.wiring.book import Book
from tidebook.wiring.settings import options_as, settings_to_json
from tidebook.wiring.spark import clears_tags


def rebuild(
    spark: SparkSession,
    book: Book,
    portal: BlockingPortal,
    topic: str,
    *,
    report: OnDifference = lambda difference: None,
) -> VerifyResult:
    """Rebuild the store of a topic from its complete log.

    Raise `LogLost` if the log does not begin at offset 0, and `Corrupt` if it was adopted.
    """
    ends = portal.run(_complete_log(book, topic))
    config = portal.run(book.store.topic_config(topic))
    if config is None:
        _refuse_adopted(topic, _last_epoch(spark, book, topic, ends))
        config = portal.run(_create_config(book, topic))
    began = bool(portal.run(book.store.pointers(topic)))
    if not began:
        _refuse_adopted(topic, config.epoch)
    done = verify(spark, book, portal, [topic], repair=True, report=report) if began else VerifyResult()
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
            f"topic {topic}: its log was adopted (epoch {epoch}), so it lacks the events of older epochs: "
            "restore the store from a backup, and replicate from there"
        )


async def _create_config(book: Book, topic: str) -> TopicConfig:
    state = await book.log.topic(topic)
    assert state is not None
    settings: JournalSettings = options_as(book.settings.section("journal"), "journal", JournalSettings)
    return await book.store.set_topic_config(
        topic, settings.topic_config(state.topic_id, state.partitions), expected=None
    )


def _last_epoch(spark: SparkSession, book: Book, topic: str, ends: dict[int, int]) -> int:
    """Return the newest epoch in the log's records, for a topic whose configuration the store has lost."""
    stops = {topic: {str(number): end for number, end in ends.items()}}
    starts = {topic: {str(number): 0 for number in ends}}
    found = read_records(spark, book.settings, starts, stops).mapInArrow(_epochs, "epoch long").collect()
    return max([FIRST_EPOCH, *(int(row["epoch"]) for row in found)])


def _epochs(batches: Batches) -> Iterator[pa.RecordBatch]:
    newest = FIRST_EPOCH
    for batch in batches:
        for value in batch.column("value").to_pylist():
            try:
                newest = max(newest, getattr(read_record(value, limit_bytes=2**31), "epoch", FIRST_EPOCH))
            except UnknownVersion:
                continue
    yield pa.RecordBatch.from_pydict({"epoch": [newest]})


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
        raise NotFound(f"topic {topic} is not in the store")
    rev = portal.run(next_repair_revision(book.store, [topic]))
    clear = clears_tags(book.settings)
    sent = msgspec.json.encode(config)

    async def write(store: StoreWriter, row: dict[str, str]) -> int:
        known = msgspec.json.decode(sent, type=TopicConfig)
        written = 0
        async for page in store.heads_in(topic, ScanSplit(row["low"], row["high"])):
            for id, head in page:
                if head.live and head.tag_counts:
                    written += await write_journal(store, Key(topic, id), known, rev=rev)
        return written

    async def remove(store: StoreWriter, row: dict[str, str]) -> int:
        return await remove_stale_rows(store, row["tag"], topic, rev=rev, clear=clear)

    settings = settings_to_json(book.settings)
    written = _sum_rows(store_splits(spark, book, portal, [topic]), settings, write)
    tags = all_tags(spark, book, portal)
    return RebuiltTags(written, 0 if tags is None else _sum_rows(tags, settings, remove))


def _sum_rows(rows: DataFrame, settings: str, count: Callable[[StoreWriter, dict[str, str]], Awaitable[int]]) -> int:
    """Call `count` with the store for each row, in tasks; return the sum of its results."""

    def task(batches: Batches) -> Iterator[pa.RecordBatch]:
        worker = SparkWorker.of(settings)

        async def counted(row: dict[str, str]) -> int:
            return await count(await worker.store(), row)

        total = sum(worker.run(counted(row)) for batch in batches for row in batch.to_pylist())
        yield pa.RecordBatch.from_pydict({"rows": [total]})

    return sum(int(row["rows"]) for row in rows.mapInArrow(task, "rows long").collect())
