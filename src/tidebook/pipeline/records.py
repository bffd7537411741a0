"""Convert log records to Arrow batches and back; the schema is shared by all record sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from tidebook.log.port import Record

SCHEMA = "topic string, partition int, offset long, timestamp_ms long, key binary, value binary"
#: The limits of one slice; the Spark session limits its Arrow batches to the same sizes.
SLICE_RECORDS_MAX = 100_000
SLICE_VALUE_BYTES_MAX = 32 * 1024 * 1024
COLUMNS = ("topic", "partition", "offset", "timestamp_ms", "key", "value")
ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)


def to_arrow(topic: str, partition: int, records: Sequence[Record]) -> pa.RecordBatch:
    """Return records of one log partition as one Arrow batch."""
    n = len(records)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(topic, pa.string()), n),
            pa.repeat(pa.scalar(partition, pa.int32()), n),
            pa.array([each.offset for each in records], pa.int64()),
            pa.array([each.timestamp_ms for each in records], pa.int64()),
            pa.array([each.key for each in records], pa.binary()),
            pa.array([each.value for each in records], pa.binary()),
        ],
        schema=ARROW,
    )


def partition_runs(batch: pa.RecordBatch) -> Iterator[tuple[str, int, list[Record]]]:
    """Yield the records of a batch as runs of consecutive rows of the same log partition."""
    topics, partitions = batch.column("topic"), batch.column("partition")
    records = [
        Record(offset, timestamp_ms, key, value)
        for offset, timestamp_ms, key, value in zip(
            *(batch.column(name).to_pylist() for name in COLUMNS[2:]), strict=True
        )
    ]
    start = 0
    for end in _run_ends(topics, partitions, len(records)):
        yield topics[start].as_py(), partitions[start].as_py(), records[start:end]
        start = end


def merge_slices(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, list[Record]]]:
    """Yield the slices of a task's batches, merging runs of one partition that a batch boundary has cut in two.

    Two slices would write each head twice. A merged slice stays within the limits above.
    """
    held: tuple[str, int, list[Record]] | None = None
    for batch in batches:
        for run in partition_runs(batch):
            if held is not None and held[:2] == run[:2] and _fit_together(held[2], run[2]):
                held = (*held[:2], held[2] + run[2])
                continue
            if held is not None:
                yield held
            held = run
    if held is not None:
        yield held


def _fit_together(records: Sequence[Record], more: Sequence[Record]) -> bool:
    if len(records) + len(more) > SLICE_RECORDS_MAX:
        return False
    return value_bytes(records) + value_bytes(more) <= SLICE_VALUE_BYTES_MAX


def value_bytes(records: Iterable[Record]) -> int:
    """Return the total size of the records' values."""
    return sum(len(each.value or b"") for each in records)


def _run_ends(topics: pa.Array, partitions: pa.Array, n: int) -> Iterator[int]:
    """Yield the end index of each run of rows of the same partition."""
    if n == 0:
        return
    numbers, names = partitions.to_pylist(), topics.to_pylist()
    if len(set(numbers)) > 1 or len(set(names)) > 1:
        yield from (i for i in range(1, n) if numbers[i] != numbers[i - 1] or names[i] != names[i - 1])
    yield n
