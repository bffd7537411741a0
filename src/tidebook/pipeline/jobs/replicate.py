"""Replicate: from the log to the store, by the fold, as a Structured Streaming job.

The pointers in the store are the truth of what was replicated. A run begins from them with a checkpoint of its own,
so an old, a copied or a lost checkpoint means nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tidebook.core.errors import NotFound
from tidebook.core.topic import TopicFacts
from tidebook.journal.topic import check_topic
from tidebook.pipeline.source.records import NAME, Offsets, RecordsSource
from tidebook.pipeline.transforms.replicate import RESULT, replicate_batches
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json


class Done(msgspec.Struct, frozen=True):
    """What one slice came to."""

    topic: str
    partition: int
    records: int
    offset: int | None
    time_ms: int | None
    stopped: str | None


#: Told of each micro-batch: its number and its slices.
OnBatch = Callable[[int, Sequence[Done]], None]


class Start(msgspec.Struct, frozen=True):
    """What a run is begun with: the facts of its topics, and the next offset of each partition."""

    facts: dict[str, TopicFacts]
    offsets: Offsets


async def find_start(book: Book, topics: Sequence[str] = ()) -> Start:
    """Read the facts and the pointers of the topics, or of all, and check the log against them."""
    facts: dict[str, TopicFacts] = {}
    offsets: Offsets = {}
    for topic in topics or await book.topics():
        found = await book.store.facts(topic)
        if found is None:
            raise NotFound(f"topic {topic}: nothing was ever appended to it")
        await check_topic(book.log, book.store, topic, found)
        facts[topic] = found
        offsets[topic] = {}
        for partition in range(found.partitions):
            pointer = await book.store.pointer(topic, partition)
            known = pointer is not None and pointer.position.epoch == found.epoch
            offsets[topic][str(partition)] = pointer.position.offset + 1 if known and pointer is not None else 0
    return Start(facts, offsets)


def start_replication(
    spark: SparkSession,
    book: Book,
    start: Start,
    *,
    once: bool,
    on_batch: OnBatch,
    rows_max: int = 500_000,
    trigger_s: float = 0.2,
) -> StreamingQuery:
    """Start the stream; it ends by itself with `once`, else when it is stopped."""
    settings = settings_to_json(book.settings)
    records = _records(spark, settings, start, rows_max)
    task = replicate_batches(settings, start.facts)

    def each(batch: DataFrame, number: int) -> None:
        rows = batch.mapInArrow(task, RESULT).collect()
        on_batch(number, [Done(**row.asDict()) for row in rows])

    writer = records.writeStream.foreachBatch(each).option(
        "checkpointLocation", str(Path(tempfile.mkdtemp(prefix="tidebook-replicate-")) / "checkpoint")
    )
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=f"{trigger_s} seconds")
    return writer.start()


def _records(spark: SparkSession, settings: str, start: Start, rows_max: int) -> DataFrame:
    spark.dataSource.register(RecordsSource)
    return (
        spark.readStream.format(NAME)
        .option("settings", settings)
        .option("starts", msgspec.json.encode(start.offsets).decode())
        .option("maxRows", str(rows_max))
        .load()
    )
