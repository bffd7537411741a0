"""What is small and goes to several partitions, sent together: a request costs a node more than a row does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tidebook.core.segments import head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import Batch, Statement

#: A node warns of a batch over several partitions that is longer than 5 KiB, and refuses one of 50.
BYTES_TOGETHER_MAX: Final = 5_000
#: A batch of more rows is worth a request of its own.
ROWS_MAX: Final = 10
HEADS_PER_QUERY_MAX: Final = 100
#: Of several segments, each of which looks for all of them.
HEADS_TOGETHER_MAX: Final = 15
#: What the parts of a row that have no length are taken for.
_VALUE_BYTES: Final = 8
#: What a node counts for a cell beside its value; a head has seven of them.
_CELL_BYTES: Final = 16


def gathered(batches: Iterable[Batch], partitions_max: int, *, rows_max: int | None = None) -> Iterator[Batch]:
    """The batches of one round, small ones in groups of up to so many; each stands for a partition of a table.

    `rows_max` bounds the rows of a group: where batches are to be smaller than that, groups are too.
    """
    group: Batch = []
    partitions = group_bytes = 0
    for batch in batches:
        if len(batch) > ROWS_MAX or partitions_max == 1:
            yield batch
            continue
        size = sum(_size_of(statement.values) for statement in batch)
        full = partitions == partitions_max or (rows_max is not None and len(group) + len(batch) > rows_max)
        if group and (full or group_bytes + size > BYTES_TOGETHER_MAX):
            yield group
            group, partitions, group_bytes = [], 0, 0
        group = group + batch
        partitions += 1
        group_bytes += size
    if group:
        yield group


def _size_of(values: list[object]) -> int:
    own = sum(len(value) if isinstance(value, (bytes, str)) else _VALUE_BYTES for value in values)
    return own + _CELL_BYTES * len(values)


def head_queries(topic: str, ids: Sequence[str], segments: int, *, together_max: int) -> Iterator[Statement]:
    """The reads of many heads: by the segment they live in, and where that leaves few, by several segments."""
    by_segment: dict[int, list[str]] = {}
    for id in ids:
        by_segment.setdefault(head_segment(id, segments), []).append(id)
    few: dict[int, list[str]] = {}
    count = 0
    for segment, wanted in by_segment.items():
        if together_max == 1 or len(wanted) > HEADS_TOGETHER_MAX // 2:
            for i in range(0, len(wanted), HEADS_PER_QUERY_MAX):
                yield Statement(cql.HEADS, [topic, segment, wanted[i : i + HEADS_PER_QUERY_MAX]])
            continue
        if len(few) == together_max or count + len(wanted) > HEADS_TOGETHER_MAX:
            yield _of_few(topic, few)
            few, count = {}, 0
        few[segment] = wanted
        count += len(wanted)
    if few:
        yield _of_few(topic, few)


def _of_few(topic: str, few: dict[int, list[str]]) -> Statement:
    if len(few) == 1:
        [(segment, ids)] = few.items()
        return Statement(cql.HEADS, [topic, segment, ids])
    return Statement(cql.HEADS_OF_SEGMENTS, [topic, list(few), [id for ids in few.values() for id in ids]])
