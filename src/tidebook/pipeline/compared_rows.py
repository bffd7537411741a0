"""The input rows of a comparison: records of the log, and heads, events and tag rows of the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, assert_never

import msgspec
import pyarrow as pa

from tidebook.core.errors import LogLost
from tidebook.core.head import Head, encode_head
from tidebook.core.record import read_record
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow, TagPosition, TagRow, advance_time
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.records import partition_runs
from tidebook.pipeline.worker import SparkWorker
from tidebook.store.port import ScanSplit

HEAD, RECORD, EVENT, TAG, DAMAGED = range(5)
ROWS = "topic string, key binary, kind int, n long, partition int, timestamp_ms long, time_ms long, data binary"
_ROWS_ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("kind", pa.int32()),
        ("n", pa.int64()),
        ("partition", pa.int32()),
        ("timestamp_ms", pa.int64()),
        ("time_ms", pa.int64()),
        ("data", pa.binary()),
    ]
)
#: The key of a damaged tag row whose journal is unknown; no journal has an empty id.
NO_KEY = b""
PAGE = 5_000

_encode = msgspec.msgpack.Encoder().encode

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Iterator[pa.RecordBatch]]


def record_rows(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Yield the records with a key, each with the log's time, to which records without a key contribute too."""
    times: dict[tuple[str, int], int] = {}
    for batch in batches:
        for topic, partition, records in partition_runs(batch):
            time_ms = times.get((topic, partition), 0)
            rows: list[tuple[Any, ...]] = []
            for record in records:
                # Only marks carry a time in their payload, and marks have no key.
                action = read_record(record.value, limit_bytes=2**31) if record.key is None else None
                time_ms = max(time_ms, record.timestamp_ms)
                if action is not None:
                    time_ms = advance_time(time_ms, record.timestamp_ms, action)
                if record.key is not None:
                    at = (RECORD, record.offset, partition, record.timestamp_ms, time_ms)
                    rows.append((topic, record.key, *at, record.value))
            times[topic, partition] = time_ms
            if rows:
                yield _to_arrow(rows)


def store_rows(settings: str) -> Task:
    """Return a function for `mapInArrow` over (topic, low, high) that yields the store's heads and events."""

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        worker = SparkWorker.of(settings)
        for batch in batches:
            for row in batch.to_pylist():
                split = ScanSplit(row["low"], row["high"])
                for page in worker.iterate(_store_pages(worker, row["topic"], split)):
                    if page:
                        yield _to_arrow(page)

    return run


async def _store_pages(worker: SparkWorker, topic: str, split: ScanSplit) -> AsyncIterator[list[tuple[Any, ...]]]:
    store = await worker.store()
    async for page in store.inspect(topic, split):
        yield [_stored_row(topic, id.encode(), row) for id, row in page]


def _stored_row(topic: str, key: bytes, row: Head | EventRow | Damage) -> tuple[Any, ...]:
    match row:
        case Head():
            return (topic, key, HEAD, 0, 0, 0, 0, encode_head(row))
        case EventRow():
            return (topic, key, EVENT, row.seq_nr, 0, 0, 0, _encode(row))
        case Damage():
            return (topic, key, DAMAGED, row.seq_nr or 0, 0, 0, 0, _encode(row))
        case _:
            assert_never(row)


def tag_rows(settings: str, configs: Mapping[str, TopicConfig]) -> Task:
    """Return a function for `mapInArrow` over (tag) that yields the tag rows of these topics."""
    wanted = {topic: each.epoch for topic, each in configs.items()}

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        worker = SparkWorker.of(settings)
        for batch in batches:
            for tag in batch.column("tag").to_pylist():
                for page in worker.iterate(_tag_pages(worker, tag, wanted)):
                    if page:
                        yield _to_arrow(page)

    return run


async def _tag_pages(worker: SparkWorker, tag: str, wanted: Mapping[str, int]) -> AsyncIterator[list[tuple[Any, ...]]]:
    store = await worker.store()
    after: TagPosition | None = None
    while page := await store.inspect_tag(tag, after=after, from_ms=0, until_ms=2**62, limit=PAGE):
        rows: list[tuple[Any, ...]] = []
        for row in page:
            if row.topic not in wanted:
                continue
            if isinstance(row, TagRow):
                rows.append((row.topic, row.id.encode(), TAG, row.seq_nr, 0, 0, 0, _encode(row)))
            else:
                key = await _key_at(worker, row.place, wanted[row.topic])
                rows.append((row.topic, key or NO_KEY, DAMAGED, 0, 0, 0, 0, _encode(row)))
        yield rows
        after = page[-1].place


async def _key_at(worker: SparkWorker, place: TagPosition | None, epoch: int) -> bytes | None:
    """Return the key of the record that a damaged tag row was written for, or None if the log no longer has it."""
    if place is None or place.epoch != epoch:
        return None
    log = await worker.log()
    try:
        page = await log.read(place.topic, place.partition, start=place.offset, stop=place.offset + 1, limit=1)
    except LogLost:
        return None
    return page.records[0].key if page.records and page.records[0].offset == place.offset else None


def _to_arrow(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True))
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _ROWS_ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_ROWS_ARROW)
