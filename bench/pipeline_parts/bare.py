"""The reference job: Spark, `mapInArrow`, the same driver and the same event rows, but no fold and no heads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import acsylla
import msgspec
import pyarrow as pa

from bench.servers import driver_session
from tidebook.core.action import Append
from tidebook.core.event import unpack_events
from tidebook.core.position import Position, write_stamp
from tidebook.core.record import decode_record
from tidebook.core.replication_plan import EventRow

AT_ONCE = 64
BATCH_ROWS = 100
SEGMENT_SIZE = 1000
PUT = "INSERT INTO {}.journal (id, topic, segment, seq_nr, event) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?"
#: Selects the node's running compactions.
TASKS = "SELECT task_id FROM system_views.sstable_tasks"
COMPACTIONS_S_MAX = 30

Batches = Iterable[pa.RecordBatch]


def bare_task(address: str, keyspace: str, topic: str) -> Callable[[Batches], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow` that numbers the events of records, writes them, and yields their count."""

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        written = asyncio.run(write(address, keyspace, topic, batches))
        yield pa.RecordBatch.from_pydict({"rows": pa.array([written], pa.int64())})

    return run


async def write(address: str, keyspace: str, topic: str, batches: Batches) -> int:
    """Write all rows of a task in single-partition batches, with bounded concurrency."""
    counts: dict[bytes, int] = {}
    written = 0
    async with driver_session(address) as session:
        prepared = await session.create_prepared(PUT.format(keyspace))
        for batch in batches:
            groups = _grouped(batch, topic, counts)
            written += sum(map(len, groups))
            waiting = iter(groups)

            async def work(waiting: Iterator[list[list[Any]]] = waiting) -> None:
                for rows in waiting:
                    await _send(session, prepared, rows)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return written


async def drop(address: str, keyspace: str) -> None:
    """Drop the keyspace of a run."""
    async with driver_session(address) as session:
        await session.query(f"DROP KEYSPACE IF EXISTS {keyspace}", timeout=60)


async def await_compactions(address: str) -> None:
    """Wait until the node has finished its compactions, which would affect the next measurement."""
    async with driver_session(address) as session:
        waited_s = quiet = 0
        while waited_s < COMPACTIONS_S_MAX and quiet < 2:
            quiet = 0 if (await session.query(TASKS)).first() else quiet + 1
            await asyncio.sleep(1)
            waited_s += 1


async def _send(session: Any, prepared: Any, rows: list[list[Any]]) -> None:
    if len(rows) == 1:
        await session.execute(prepared.bind(rows[0]))
        return
    together = acsylla.create_batch_unlogged()
    for values in rows:
        together.add_statement(prepared.bind(values))
    await session.execute_batch(together)


def _grouped(batch: pa.RecordBatch, topic: str, counts: dict[bytes, int]) -> list[list[list[Any]]]:
    """Return the rows of a batch by their partition of the table."""
    encode = msgspec.msgpack.encode
    groups: dict[tuple[bytes, int], list[list[Any]]] = {}
    full: list[list[list[Any]]] = []
    columns = (batch.column(name).to_pylist() for name in ("offset", "timestamp_ms", "key", "value"))
    for offset, timestamp_ms, key, value in zip(*columns, strict=True):
        action = decode_record(value)
        if not isinstance(action, Append):  # a mark
            continue
        at = Position(1, offset)
        for i, encoded in enumerate(unpack_events(action.body)):
            number = counts[key] = counts.get(key, 0) + 1
            segment = (number - 1) // SEGMENT_SIZE
            cell = encode(EventRow(number, encoded, timestamp_ms, at, i, timestamp_ms))
            rows = groups.setdefault((key, segment), [])
            rows.append([key.decode(), topic, segment, number, cell, write_stamp(at)])
            if len(rows) == BATCH_ROWS:
                full.append(groups.pop((key, segment)))
    return full + list(groups.values())
