"""Verify: fold the log and compare the store with it, journal by journal; with `repair`, mend what differs.

Records, heads, event rows and tag rows are brought together by journal in one shuffle, so nothing is asked for one by
one, and each task holds one journal at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tidebook.core.errors import NotFound
from tidebook.core.portal import Portal
from tidebook.core.topic import TopicFacts
from tidebook.journal.topic import check_topic
from tidebook.pipeline.compare import (
    CHECKED,
    RESULT,
    ROWS,
    Bounds,
    Comparison,
    compare_task,
    record_rows,
    store_rows,
    tag_rows,
)
from tidebook.pipeline.source.records import Offsets
from tidebook.pipeline.source.stream import read_records
from tidebook.pipeline.status import topic_facts
from tidebook.pipeline.transforms.shelf import Difference
from tidebook.store.revision import next_rev
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

#: How often a repair looks whether anything is left to mend.
PASSES_MAX = 3
SPLITS_PER_CORE = 2


class Verified(msgspec.Struct, frozen=True):
    """What a run came to."""

    journals: int = 0
    events: int = 0
    #: What differed at the first look, by kind, and how much of it was mended.
    differences: dict[str, int] = {}
    mended: int = 0
    #: What still differs.
    left: int = 0
    #: Topics whose log no longer reaches back to its start: what lies before it was taken on the store's word.
    partial: tuple[str, ...] = ()


Tell = Callable[[Difference], None]


def verify(
    spark: SparkSession,
    book: Book,
    portal: Portal,
    topics: Sequence[str] = (),
    *,
    repair: bool = False,
    tell: Tell = lambda difference: None,
) -> Verified:
    """Compare the store with the log as far as it is replicated. Differences are told one by one."""
    facts = portal.run(_facts(book, topics))
    if not facts:
        return Verified()
    first = _compare(spark, book, portal, facts, tell)
    if not repair or not first.left:
        return first
    left = first
    for _ in range(PASSES_MAX):
        rev = portal.run(next_rev(book.store, tuple(facts)))
        _compare(spark, book, portal, facts, lambda difference: None, rev=rev)
        left = _compare(spark, book, portal, facts, lambda difference: None)
        if not left.left:
            break
    return msgspec.structs.replace(first, mended=first.left - left.left, left=left.left)


async def _facts(book: Book, topics: Sequence[str]) -> dict[str, TopicFacts]:
    facts = await topic_facts(book, tuple(topics))
    for topic in topics:
        if topic not in facts:
            raise NotFound(f"topic {topic}: the store has nothing of it")
    for topic, each in facts.items():
        await check_topic(book.log, book.store, topic, each)
    return facts


async def _bounds(book: Book, facts: dict[str, TopicFacts]) -> dict[str, dict[int, Bounds]]:
    """What is compared of each partition; one that was never replicated is left out."""
    found: dict[str, dict[int, Bounds]] = {}
    for topic, each in facts.items():
        found[topic] = {}
        for number in range(each.partitions):
            pointer = await book.store.pointer(topic, number)
            if pointer is not None and pointer.position.epoch == each.epoch:
                found[topic][number] = Bounds(await book.log.start(topic, number), pointer)
    return found


def _compare(
    spark: SparkSession, book: Book, portal: Portal, facts: dict[str, TopicFacts], tell: Tell, *, rev: int = 0
) -> Verified:
    bounds = portal.run(_bounds(book, facts))
    comparison = Comparison(settings_to_json(book.settings), facts, bounds, rev)
    rows = _rows(spark, book, portal, comparison)
    parts = spark.sparkContext.defaultParallelism * SPLITS_PER_CORE
    together = rows.repartition(parts, "topic", "key").sortWithinPartitions("topic", "key", "kind", "n")
    journals = events = left = mended = 0
    kinds: dict[str, int] = {}
    for row in together.mapInArrow(compare_task(comparison), RESULT).toLocalIterator():
        if row["what"] == CHECKED:
            journals, events = journals + row["journals"], events + row["events"]
            continue
        found = Difference(**{name: row[name] for name in Difference.__struct_fields__})
        kinds[found.what] = kinds.get(found.what, 0) + 1
        mended, left = mended + found.mended, left + (not found.mended)
        tell(found)
    partial = tuple(topic for topic, each in bounds.items() if any(one.start > 0 for one in each.values()))
    return Verified(journals, events, kinds, mended, left, partial)


def _rows(spark: SparkSession, book: Book, portal: Portal, comparison: Comparison) -> DataFrame:
    """Everything that is known of the journals, as rows of one shape."""
    topics = list(comparison.facts)
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
        found = found.union(named.mapInArrow(tag_rows(comparison.settings, topics), ROWS))
    return found


async def _splits(book: Book, topics: Sequence[str], count: int) -> list[tuple[str, str, str]]:
    found = await asyncio.gather(*(book.store.splits(topic, count=count) for topic in topics))
    return [(topic, each.low, each.high) for topic, of in zip(topics, found, strict=True) for each in of]


async def _tags(book: Book) -> list[str]:
    return [tag async for tag in book.store.tags()]
