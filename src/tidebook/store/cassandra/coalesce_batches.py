"""Combine small batches and reads of several partitions into one request: a request costs a node more than a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tidebook.core.segments import head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import Batch, CqlStatement

#: By default a node warns about a multi-partition batch over 5 KiB and rejects one over 50 KiB.
BYTES_TOGETHER_MAX: Final = 5_000
#: A batch with more rows is sent by itself.
ROWS_MAX: Final = 10
HEADS_PER_QUERY_MAX: Final = 100
#: The ids of a query over several segments: each segment is searched for all of them.
HEADS_TOGETHER_MAX: Final = 15
#: The assumed size of a value without a length.
_VALUE_BYTES: Final = 8
#: A cell's overhead as a node counts it; a head has seven cells.
_CELL_BYTES: Final = 16


def coalesce_batches(batches: Iterable[Batch], partitions_max: int, *, rows_max: int | None = None) -> Iterator[Batch]:
    """Yield the batches of one round, with small ones combined over up to `partitions_max` partitions.

    Each input batch belongs to one partition of one table. `rows_max`, if given, limits the rows of a combined batch.
    """
    group: Batch = []
    partitions = group_bytes = 0
    for batch in batches:
        if len(batch) > ROWS_MAX or partitions_max == 1:
            yield batch
            continue
        size = sum(_size_bytes(statement.values) for statement in batch)
        full = partitions == partitions_max or (rows_max is not None and len(group) + len(batch) > rows_max)
        if group and (full or group_bytes + size > BYTES_TOGETHER_MAX):
            yield group
            group, partitions, group_bytes = [], 0, 0
        group = group + batch
        partitions += 1
        group_bytes += size
    if group:
        yield group


def _size_bytes(values: list[object]) -> int:
    value_bytes = sum(len(value) if isinstance(value, (bytes, str)) else _VALUE_BYTES for value in values)
    return value_bytes + _CELL_BYTES * len(values)


def head_queries(topic: str, ids: Sequence[str], segments: int, *, together_max: int) -> Iterator[CqlStatement]:
    """Yield the queries for many heads: one per segment, or one over several segments that have few ids each."""
    by_segment: dict[int, list[str]] = {}
    for id in ids:
        by_segment.setdefault(head_segment(id, segments), []).append(id)
    few_ids: dict[int, list[str]] = {}
    count = 0
    for segment, wanted in by_segment.items():
        if together_max == 1 or len(wanted) > HEADS_TOGETHER_MAX // 2:
            for i in range(0, len(wanted), HEADS_PER_QUERY_MAX):
                yield CqlStatement(cql.HEADS, [topic, segment, wanted[i : i + HEADS_PER_QUERY_MAX]])
            continue
        if len(few_ids) == together_max or count + len(wanted) > HEADS_TOGETHER_MAX:
            yield _query_few(topic, few_ids)
            few_ids, count = {}, 0
        few_ids[segment] = wanted
        count += len(wanted)
    if few_ids:
        yield _query_few(topic, few_ids)


def _query_few(topic: str, few_ids: dict[int, list[str]]) -> CqlStatement:
    if len(few_ids) == 1:
        [(segment, ids)] = few_ids.items()
        return CqlStatement(cql.HEADS, [topic, segment, ids])
    return CqlStatement(cql.HEADS_OF_SEGMENTS, [topic, list(few_ids), [id for ids in few_ids.values() for id in ids]])
