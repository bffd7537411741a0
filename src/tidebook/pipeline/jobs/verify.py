"""Verify the store: fold the log, compare each journal with the store, and optionally repair the differences.

One shuffle groups records, heads, event rows and tag rows by journal, so that the store is scanned instead of queried
per journal, and each task holds one journal in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tidebook.core.errors import NotFound
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.topic import check_topic
from tidebook.pipeline.compare import RESULT, TOTALS, CompareBounds, Comparison, compare_task
from tidebook.pipeline.compared_rows import ROWS, record_rows, store_rows, tag_rows
from tidebook.pipeline.source.records import Offsets
from tidebook.pipeline.source.stream import read_records
from tidebook.pipeline.status import topic_configs
from tidebook.replication.journal_state import Difference
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.store.port import next_repair_revision
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

#: How often a repair is repeated while differences are left.
REPAIR_PASSES_MAX = 3
SPLITS_PER_CORE = 2


class VerifyResult(msgspec.Struct, frozen=True):
    """The result of a verification."""

    journals: int = 0
    events: int = 0
    #: The differences of the first comparison by kind, and how many of them were repaired.
    differences: dict[str, int] = {}
    repaired: int = 0
    #: The number of remaining differences.
    left: int = 0
    #: Topics whose log begins after offset 0: the store's older rows could not be compared.
    partial: tuple[str, ...] = ()


Tell = Callable[[Difference], None]


def verify(
    spark: SparkSession,
    book: Book,
    portal: BlockingPortal,
    topics: Sequence[str] = (),
    *,
    repair: bool = False,
    tell: Tell = lambda difference: None,
) -> VerifyResult:
    """Compare the store with the replicated part of the log; call `tell` for each difference."""
    configs = portal.run(_configs(book, topics))
    if not configs:
        return VerifyResult()
    first = _compare(spark, book, portal, configs, tell)
    if not repair or not first.left:
        return first
    left = first
    for _ in range(REPAIR_PASSES_MAX):
        rev = portal.run(next_repair_revision(book.store, tuple(configs)))
        _compare(spark, book, portal, configs, lambda difference: None, rev=rev)
        left = _compare(spark, book, portal, configs, lambda difference: None)
        if not left.left:
            break
    return msgspec.structs.replace(first, repaired=first.left - left.left, left=left.left)


async def _configs(book: Book, topics: Sequence[str]) -> dict[str, TopicConfig]:
    configs = await topic_configs(book, tuple(topics))
    for topic in topics:
        if topic not in configs:
            raise NotFound(f"topic {topic}: the store has nothing of it")
    for topic, each in configs.items():
        await check_topic(book.log, book.store, topic, each)
    return configs


async def _bounds(book: Book, configs: dict[str, TopicConfig]) -> dict[str, dict[int, CompareBounds]]:
    """Return the compared range of each partition that is replicated in the current epoch."""
    found: dict[str, dict[int, CompareBounds]] = {}
    for topic, each in configs.items():
        found[topic] = {}
        for number in range(each.partitions):
            pointer = await book.store.pointer(topic, number)
            if pointer is not None and pointer.position.epoch == each.epoch:
                found[topic][number] = CompareBounds(await book.log.start(topic, number), pointer)
    return found


def _compare(
    spark: SparkSession,
    book: Book,
    portal: BlockingPortal,
    configs: dict[str, TopicConfig],
    tell: Tell,
    *,
    rev: int = 0,
) -> VerifyResult:
    bounds = portal.run(_bounds(book, configs))
    comparison = Comparison(settings_to_json(book.settings), configs, bounds, rev)
    rows = _rows(spark, book, portal, comparison)
    parts = spark.sparkContext.defaultParallelism * SPLITS_PER_CORE
    together = rows.repartition(parts, "topic", "key").sortWithinPartitions("topic", "key", "kind", "n")
    journals = events = left = repaired = 0
    kinds: dict[str, int] = {}
    for row in together.mapInArrow(compare_task(comparison), RESULT).toLocalIterator():
        if row["what"] == TOTALS:
            journals, events = journals + row["journals"], events + row["events"]
            continue
        found = Difference(**{name: row[name] for name in Difference.__struct_fields__})
        kinds[found.what] = kinds.get(found.what, 0) + 1
        repaired, left = repaired + found.repaired, left + (not found.repaired)
        tell(found)
    partial = tuple(topic for topic, each in bounds.items() if any(one.start > 0 for one in each.values()))
    return VerifyResult(journals, events, kinds, repaired, left, partial)


def _rows(spark: SparkSession, book: Book, portal: BlockingPortal, comparison: Comparison) -> DataFrame:
    """Return all records, heads, events and tag rows of the journals, with one schema."""
    topics = list(comparison.configs)
    starts: Offsets = {
        topic: {str(number): each.start for number, each in numbers.items()}
        for topic, numbers in comparison.bounds.items()
    }
    stops: Offsets = {
        topic: {str(number): max(each.start, each.pointer.position.offset + 1) for number, each in numbers.items()}
        for topic, numbers in comparison.bounds.items()
    }
    starts, stops = ({t: o for t, o in each.items() if o} for each in (starts, stops))
    parts = spark.sparkContext.defaultParallelism * SPLITS_PER_CORE
    splits = portal.run(_splits(book, topics, parts))
    context = spark.sparkContext
    stored = spark.createDataFrame(context.parallelize(splits, len(splits)), "topic string, low string, high string")
    found = stored.mapInArrow(store_rows(comparison.settings), ROWS)
    if starts:
        records = read_records(spark, book.settings, starts, stops).mapInArrow(record_rows, ROWS)
        found = found.union(records)
    tags = [(tag,) for tag in portal.run(_tags(book))]
    if tags:
        named = spark.createDataFrame(context.parallelize(tags, min(len(tags), parts)), "tag string")
        found = found.union(named.mapInArrow(tag_rows(comparison.settings, comparison.configs), ROWS))
    return found


async def _splits(book: Book, topics: Sequence[str], count: int) -> list[tuple[str, str, str]]:
    found = await asyncio.gather(*(book.store.splits(topic, count=count) for topic in topics))
    return [(topic, each.low, each.high) for topic, of in zip(topics, found, strict=True) for each in of]


async def _tags(book: Book) -> list[str]:
    return [tag async for tag in book.store.tags()]
