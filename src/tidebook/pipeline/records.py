"""Records of the log as Arrow: the columns that every source of records has, and the way back to records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from tidebook.log.port import Record

SCHEMA = "topic string, partition int, offset long, timestamp_ms long, key binary, value binary"
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
    """Records of one log partition as one batch."""
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


def runs_of(batch: pa.RecordBatch) -> Iterator[tuple[str, int, list[Record]]]:
    """The records of a batch, by runs of one log partition; a task's batches have one run each."""
    topics, partitions = batch.column("topic"), batch.column("partition")
    records = [
        Record(offset, timestamp_ms, key, value)
        for offset, timestamp_ms, key, value in zip(
            *(batch.column(name).to_pylist() for name in COLUMNS[2:]), strict=True
        )
    ]
    start = 0
    for end in _borders(topics, partitions, len(records)):
        yield topics[start].as_py(), partitions[start].as_py(), records[start:end]
        start = end


def _borders(topics: pa.Array, partitions: pa.Array, n: int) -> Iterator[int]:
    """Behind which rows another partition begins, the end included."""
    if n == 0:
        return
    numbers, names = partitions.to_pylist(), topics.to_pylist()
    if len(set(numbers)) > 1 or len(set(names)) > 1:
        yield from (i for i in range(1, n) if numbers[i] != numbers[i - 1] or names[i] != names[i - 1])
    yield n
