"""The reference for many journals: the same driver reads and writes the same heads and event rows; no fold, no fences.

Each Arrow batch is one slice, as in the pipeline: its heads are read by segment, its event rows are written, then its
heads. The pipeline adds pointers, retries, deletes, tags, and the fold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import acsylla
import msgspec
import pyarrow as pa

from bench.servers import driver_session
from tidebook.core.action import Append
from tidebook.core.event import unpack_events
from tidebook.core.head import Head, RecentAppend, encode_head
from tidebook.core.position import Position, write_stamp
from tidebook.core.record import decode_record
from tidebook.core.replication_plan import EventRow
from tidebook.core.segments import head_segment
from tidebook.store.cassandra import statements as cql

AT_ONCE = 128
ROWS_TOGETHER = 10
HEADS_TOGETHER = 100
SEGMENTS = 512
SEGMENT_SIZE = 1000

Batches = Iterable[pa.RecordBatch]
Values = list[Any]


def bare_journals_task(address: str, keyspace: str, topic: str) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow` over records of one event; it yields the number of rows that it wrote."""

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        written = asyncio.run(_write(address, keyspace, topic, batches))
        yield pa.RecordBatch.from_pydict({"rows": pa.array([written], pa.int64())})

    return run


async def _write(address: str, keyspace: str, topic: str, batches: Batches) -> int:
    written = 0
    async with driver_session(address, keyspace) as session:
        heads, put_event, put_head = [
            await session.create_prepared(each) for each in (cql.HEADS, cql.PUT_EVENT, cql.PUT_HEAD)
        ]

        async def read(values: Values) -> None:
            for _ in await session.execute(heads.bind(values)):
                pass

        async def put(prepared: Any, rows: list[Values]) -> None:
            together = acsylla.create_batch_unlogged()
            for values in rows:
                together.add_statement(prepared.bind(values))
            await session.execute_batch(together)

        for batch in batches:
            events, by_segment = _rows(batch, topic)
            written += len(events)
            in_segments = [part for rows in by_segment.values() for part in _parts(rows, HEADS_TOGETHER)]
            await _each(read, ([topic, part[0][1], [values[2] for values in part]] for part in in_segments))
            await _each(partial(put, put_event), _parts(events, ROWS_TOGETHER))
            await _each(partial(put, put_head), in_segments)
    return written


async def _each(act: Callable[[Any], Any], items: Iterable[Any]) -> None:
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await act(item)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def _parts(rows: list[Values], size: int) -> Iterator[list[Values]]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


def _rows(batch: pa.RecordBatch, topic: str) -> tuple[list[Values], dict[int, list[Values]]]:
    """Return the event rows of a batch, and its heads by segment."""
    encode = msgspec.msgpack.encode
    events: list[Values] = []
    by_segment: dict[int, list[Values]] = {}
    columns = (batch.column(name).to_pylist() for name in ("offset", "timestamp_ms", "key", "value"))
    for offset, timestamp_ms, key, value in zip(*columns, strict=True):
        action = decode_record(value)
        if not isinstance(action, Append):  # a mark
            continue
        id, at = key.decode(), Position(1, offset)
        stamp = write_stamp(at)
        [encoded] = unpack_events(action.body)
        events.append([id, topic, 0, 1, encode(EventRow(1, encoded, timestamp_ms, at, 0, timestamp_ms)), stamp])
        recent = (RecentAppend(action.append_id, 1, 1, at),)
        head = encode_head(Head(True, 1, 0, at, at, SEGMENT_SIZE, None, timestamp_ms, recent, None, ()))
        segment = head_segment(id, SEGMENTS)
        by_segment.setdefault(segment, []).append([topic, segment, id, head, True, 1, 0, 1, offset, 0, stamp])
    return events, by_segment
