"""Verify the store: fold the log, compare each journal with the store, and optionally repair the differences.

One shuffle groups records, heads, event rows and tag rows by journal. The store is therefore scanned, not queried for
each journal, and a task has one journal in memory at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, assert_never

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tidebook.core.errors import LogLost, NotFound
from tidebook.core.head import Head, decode_head, encode_head
from tidebook.core.key import Key, home_of
from tidebook.core.record import read_record
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow, TagPosition, TagRow, advance_time
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.topic import check_topic
from tidebook.log.port import Record
from tidebook.pipeline.arrow import Batches, Task, arrow_schema, rows_to_arrow
from tidebook.pipeline.source.records import Offsets, partition_runs, read_records
from tidebook.pipeline.worker import SparkWorker
from tidebook.replication.compare import PAGE, CompareBounds, JournalComparer, TimedRecord
from tidebook.replication.journal_state import Difference, JournalState
from tidebook.replication.status import topic_configs
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.store.port import ScanSplit, next_repair_revision
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json
from tidebook.wiring.spark import clears_tags

#: The maximum number of passes of a repair, each of which may leave differences.
REPAIR_PASSES_MAX = 3
SPLITS_PER_CORE = 2
#: The rows that are grouped by journal: records of the log, and heads, events and tag rows of the store.
ROWS = "topic string, key binary, kind int, n long, partition int, timestamp_ms long, time_ms long, data binary"
HEAD, RECORD, EVENT, TAG, DAMAGED = range(5)
#: The key of damaged tag rows whose journal is unknown; no journal has an empty id.
NO_KEY = b""
RESULT = (
    "what string, topic string, id string, partition int, seq_nr long, expected string, found string, "
    "repaired boolean, journals long, events long"
)
#: The `what` of the last row of each task, which counts the compared journals and events.
TOTALS = "checked"
RESULTS_PER_BATCH = 1000

_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(EventRow).decode
_decode_tag = msgspec.msgpack.Decoder(TagRow).decode
_decode_damage = msgspec.msgpack.Decoder(Damage).decode
_Row = tuple[Any, ...]


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


class Comparison(msgspec.Struct, frozen=True):
    """The parameters of a comparison, sent to every worker."""

    settings: str
    configs: dict[str, TopicConfig]
    #: The bounds by topic and partition.
    bounds: dict[str, dict[int, CompareBounds]]
    #: The repair revision; 0 to report differences without repairing them.
    rev: int = 0


OnDifference = Callable[[Difference], None]


def verify(
    spark: SparkSession,
    book: Book,
    portal: BlockingPortal,
    topics: Sequence[str] = (),
    *,
    repair: bool = False,
    report: OnDifference = lambda difference: None,
) -> VerifyResult:
    """Compare the store with the replicated part of the log; call `report` for each difference.

    With `repair`, repair the differences then, and compare again.
    """
    configs = portal.run(_configs(book, topics))
    if not configs:
        return VerifyResult()
    first = left = _compare(spark, book, portal, configs, report)
    if not repair or not first.left:
        return first
    for _ in range(REPAIR_PASSES_MAX):
        rev = portal.run(next_repair_revision(book.store, tuple(configs)))
        _compare(spark, book, portal, configs, rev=rev)
        left = _compare(spark, book, portal, configs)
        if not left.left:
            break
    return msgspec.structs.replace(first, repaired=first.left - left.left, left=left.left)


async def _configs(book: Book, topics: Sequence[str]) -> dict[str, TopicConfig]:
    configs = await topic_configs(book.store, topics)
    for topic in topics:
        if topic not in configs:
            raise NotFound(f"topic {topic} is not in the store")
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
    report: OnDifference = lambda difference: None,
    *,
    rev: int = 0,
) -> VerifyResult:
    bounds = portal.run(_bounds(book, configs))
    comparison = Comparison(settings_to_json(book.settings), configs, bounds, rev)
    rows = _rows(spark, book, portal, comparison)
    parts = spark.sparkContext.defaultParallelism * SPLITS_PER_CORE
    by_journal = rows.repartition(parts, "topic", "key").sortWithinPartitions("topic", "key", "kind", "n")
    journals = events = left = repaired = 0
    kinds: dict[str, int] = {}
    for row in by_journal.mapInArrow(compare_task(comparison), RESULT).toLocalIterator():
        if row["what"] == TOTALS:
            journals, events = journals + row["journals"], events + row["events"]
            continue
        found = Difference(**{name: row[name] for name in Difference.__struct_fields__})
        kinds[found.what] = kinds.get(found.what, 0) + 1
        repaired, left = repaired + found.repaired, left + (not found.repaired)
        report(found)
    partial = tuple(topic for topic, each in bounds.items() if any(one.start > 0 for one in each.values()))
    return VerifyResult(journals, events, kinds, repaired, left, partial)


def _rows(spark: SparkSession, book: Book, portal: BlockingPortal, comparison: Comparison) -> DataFrame:
    """Return all records, heads, events and tag rows of the journals, with one schema."""
    starts: Offsets = {}
    stops: Offsets = {}
    for topic, numbers in comparison.bounds.items():
        if numbers:
            starts[topic] = {str(number): each.start for number, each in numbers.items()}
            stops[topic] = {
                str(number): max(each.start, each.pointer.position.offset + 1) for number, each in numbers.items()
            }
    found = store_splits(spark, book, portal, list(comparison.configs)).mapInArrow(
        store_rows(comparison.settings), ROWS
    )
    if starts:
        found = found.union(read_records(spark, book.settings, starts, stops).mapInArrow(record_rows, ROWS))
    tags = all_tags(spark, book, portal)
    if tags is not None:
        found = found.union(tags.mapInArrow(tag_rows(comparison.settings, comparison.configs), ROWS))
    return found


def store_splits(spark: SparkSession, book: Book, portal: BlockingPortal, topics: Sequence[str]) -> DataFrame:
    """Return the splits of these topics' rows in the store, one per task: topic, low, high."""
    count = spark.sparkContext.defaultParallelism * SPLITS_PER_CORE
    rows = [
        (topic, each.low, each.high) for topic in topics for each in portal.run(book.store.splits(topic, count=count))
    ]
    return spark.createDataFrame(
        spark.sparkContext.parallelize(rows, len(rows)), "topic string, low string, high string"
    )


def all_tags(spark: SparkSession, book: Book, portal: BlockingPortal) -> DataFrame | None:
    """Return all tags of the store, distributed over the tasks; None if there are none."""

    async def read() -> list[tuple[str]]:
        return [(tag,) async for tag in book.store.tags()]

    if not (tags := portal.run(read())):
        return None
    count = min(len(tags), spark.sparkContext.defaultParallelism * SPLITS_PER_CORE)
    return spark.createDataFrame(spark.sparkContext.parallelize(tags, count), "tag string")


# Tasks that yield the rows


def record_rows(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Yield the records with a key, each with the log's time, which records without a key advance too."""
    times: dict[tuple[str, int], int] = {}
    for batch in batches:
        for topic, partition, records in partition_runs(batch):
            time_ms = times.get((topic, partition), 0)
            rows: list[_Row] = []
            for record in records:
                # Only marks have a time in their payload, and marks have no key.
                if record.key is None:
                    action = read_record(record.value, limit_bytes=2**31)
                    time_ms = advance_time(time_ms, record.timestamp_ms, action)
                else:
                    time_ms = max(time_ms, record.timestamp_ms)
                    at = (RECORD, record.offset, partition, record.timestamp_ms, time_ms)
                    rows.append((topic, record.key, *at, record.value))
            times[topic, partition] = time_ms
            if rows:
                yield rows_to_arrow(rows, arrow_schema(ROWS))


def store_rows(settings: str) -> Task:
    """Return a function for `mapInArrow` over (topic, low, high) that yields the store's heads and events."""

    async def pages(worker: SparkWorker, row: dict[str, str]) -> AsyncIterator[list[_Row]]:
        topic, store = row["topic"], await worker.store()
        async for page in store.inspect(topic, ScanSplit(row["low"], row["high"])):
            yield [(topic, id.encode(), *_stored_row(found)) for id, found in page]

    return _paged(settings, pages)


def tag_rows(settings: str, configs: Mapping[str, TopicConfig]) -> Task:
    """Return a function for `mapInArrow` over (tag) that yields the tag rows of these topics."""
    epochs = {topic: each.epoch for topic, each in configs.items()}

    async def pages(worker: SparkWorker, row: dict[str, str]) -> AsyncIterator[list[_Row]]:
        store = await worker.store()
        after: TagPosition | None = None
        while page := await store.inspect_tag(row["tag"], after=after, from_ms=0, until_ms=2**62, limit=PAGE):
            rows: list[_Row] = []
            for found in page:
                if found.topic in epochs:
                    key = found.id.encode() if isinstance(found, TagRow) else await _key_at(worker, found, epochs)
                    rows.append((found.topic, key, *_stored_row(found)))
            yield rows
            after = page[-1].place

    return _paged(settings, pages)


def _paged(settings: str, pages: Callable[[SparkWorker, dict[str, str]], AsyncIterator[list[_Row]]]) -> Task:
    """Return a function for `mapInArrow` that yields the pages of each of its rows."""

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        worker, schema = SparkWorker.of(settings), arrow_schema(ROWS)
        for batch in batches:
            for row in batch.to_pylist():
                yield from (rows_to_arrow(page, schema) for page in worker.iterate(pages(worker, row)) if page)

    return run


def _stored_row(row: Head | EventRow | TagRow | Damage) -> _Row:
    """Return a row of the store without its topic and key."""
    match row:
        case Head():
            kind, n, data = HEAD, 0, encode_head(row)
        case EventRow():
            kind, n, data = EVENT, row.seq_nr, _encode(row)
        case TagRow():
            kind, n, data = TAG, row.seq_nr, _encode(row)
        case Damage():
            kind, n, data = DAMAGED, row.seq_nr or 0, _encode(row)
        case _:
            assert_never(row)
    return (kind, n, 0, 0, 0, data)


async def _key_at(worker: SparkWorker, damage: Damage, epochs: Mapping[str, int]) -> bytes:
    """Return the key of the record that a damaged tag row was written for; `NO_KEY` if the log no longer has it."""
    place = damage.place
    if place is None or place.epoch != epochs[damage.topic]:
        return NO_KEY
    log = await worker.log()
    try:
        page = await log.read(place.topic, place.partition, start=place.offset, stop=place.offset + 1, limit=1)
    except LogLost:
        return NO_KEY
    return next((record.key or NO_KEY for record in page.records if record.offset == place.offset), NO_KEY)


# The task that compares


def compare_task(comparison: Comparison) -> Task:
    """Return a function for `mapInArrow` over rows sorted by journal; it yields the differences, then the totals."""
    sent = msgspec.json.encode(comparison)

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        decoded = msgspec.json.decode(sent, type=Comparison)
        compared, schema = ComparedJournals(decoded), arrow_schema(RESULT)
        each_row = (row for batch in batches for row in zip(*(one.to_pylist() for one in batch.columns), strict=True))
        results: list[dict[str, Any]] = []
        for (topic, key), rows in groupby(each_row, lambda row: (row[0], row[1])):
            results += (msgspec.to_builtins(each) for each in compared.differences(topic, key, rows))
            if len(results) >= RESULTS_PER_BATCH:
                yield pa.RecordBatch.from_pylist(results, schema=schema)
                results = []
        results.append({"what": TOTALS, "journals": compared.journals, "events": compared.events})
        yield pa.RecordBatch.from_pylist(results, schema=schema)

    return run


class ComparedJournals:
    """Compares the journals of one task and counts them."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._worker = SparkWorker.of(comparison.settings)
        self._comparer = JournalComparer(
            self._worker,
            comparison.configs,
            comparison.bounds,
            rev=comparison.rev,
            clear_tags=clears_tags(self._worker.settings),
        )
        self.journals = self.events = 0

    def differences(self, topic: str, key: bytes, rows: Iterable[_Row]) -> list[Difference]:
        """Compare one journal; if it differs, read it again, because replication may have changed it meanwhile."""
        if key == NO_KEY:  # damaged tag rows whose record the log no longer has
            remedy = f"the log does not have its record: run 'tidebook pipeline rebuild {topic} --tags'"
            damaged = [_decode_damage(row[-1]) for row in rows if row[2] == DAMAGED]
            return [
                Difference(
                    "tag damaged",
                    topic,
                    "",
                    each.place.partition if each.place else 0,
                    found=f"{each.reason}; {remedy}",
                )
                for each in damaged
            ]
        id, partition = home_of(key, self._comparison.configs[topic].partitions)
        if id is None or partition is None:
            return []  # replication has parked the record
        if partition not in self._comparison.bounds[topic]:
            return []  # the partition is not replicated yet
        found, records = JournalState(), list[TimedRecord]()
        for _, _, kind, n, record_partition, timestamp_ms, time_ms, data in rows:
            if kind == HEAD:
                found.head = decode_head(data)
            elif kind == EVENT:
                found.rows[n] = _decode_event(data)
            elif kind == TAG:
                row = _decode_tag(data)
                found.tags[row.place] = row
            elif kind == DAMAGED:
                found.damaged += (_decode_damage(data),)
            elif record_partition == partition:  # in any other partition the record is void and parked
                records.append((Record(n, timestamp_ms, key, data), time_ms))
        self.journals += 1
        self.events += len(found.rows)
        journal = (Key(topic, id), partition, found, records)
        if self._comparer.is_equal(*journal):
            return []
        return self._worker.run(self._comparer.compare(*journal))
