"""The exact bounds of batches and queries: one more statement would exceed a bound."""

from __future__ import annotations

import pytest

pytest.importorskip("acsylla")

from itertools import pairwise

from tidebook.core.head import Head, encode_head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, PutEvents, PutHead
from tidebook.core.segments import head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    COALESCED_BATCH_ROWS_MAX,
    COALESCED_BYTES_MAX,
    HEADS_PER_QUERY_MAX,
    SEGMENTS_QUERY_IDS_MAX,
    Batch,
    CqlStatement,
    bounded,
    coalesce_batches,
    event_batches,
    head_batches,
    head_queries,
)

KEY = Key("orders", "o-1")


def head_of(seq_nr: int, size: int) -> Head:
    return Head(True, seq_nr, 0, Position(1, 0), Position(1, 99), size, None, 0, (), None, ())


def put(count: int, *, segment_size: int, encoded: bytes = b"x", first: int = 1) -> PutEvents:
    """Return the rows of this many records of one event each."""
    rows = tuple(EventRow(first + n, encoded, 5, Position(1, n), 0) for n in range(count))
    return PutEvents(KEY, head_of(first + count, segment_size), rows)


@pytest.mark.parametrize("first", [1, 3, 5, 6])
def test_the_rows_of_a_segment_share_a_batch(first: int) -> None:
    batches = list(event_batches(put(12, segment_size=5, first=first)))
    numbers = [[each.values[3] for each in batch] for batch in batches]
    assert [each for batch in numbers for each in batch] == list(range(first, first + 12))
    assert all((before[-1] - 1) // 5 + 1 == (after[0] - 1) // 5 for before, after in pairwise(numbers))
    assert [{each.values[2] for each in batch} for batch in batches] == [{(batch[0] - 1) // 5} for batch in numbers]


def test_a_batch_has_up_to_its_maximum_of_rows() -> None:
    sizes = [len(batch) for batch in event_batches(put(2 * BATCH_ROWS_MAX + 1, segment_size=1000))]
    assert sizes == [BATCH_ROWS_MAX, BATCH_ROWS_MAX, 1]


@pytest.mark.parametrize("size", [900, 3_000, 13_000, *range(3_860, 3_900, 4)])
def test_a_batch_has_up_to_its_maximum_of_bytes(size: int) -> None:
    batches = list(event_batches(put(40, segment_size=1000, encoded=b"x" * size)))
    [row_bytes] = {len(each.values[4]) + len(KEY.id) + 100 for batch in batches for each in batch}
    fits = min(BATCH_BYTES_MAX // row_bytes, BATCH_ROWS_MAX)
    assert [len(batch) for batch in batches] == [fits] * (40 // fits) + ([40 % fits] if 40 % fits else [])


@pytest.mark.parametrize("id_bytes", [10, 500, 900])
def test_heads_of_long_ids_share_a_batch_up_to_its_bytes(id_bytes: int) -> None:
    puts = [PutHead(Key("orders", f"{number:0{id_bytes}}"), head_of(5, 1000)) for number in range(120)]
    batches = list(head_batches(puts, 1, tags={}))
    [row_bytes] = {len(encode_head(put.head)) + id_bytes + 150 for put in puts}
    fits = min(BATCH_BYTES_MAX // row_bytes, BATCH_ROWS_MAX)
    assert [len(batch) for batch in batches][:-1] == [fits] * ((120 - 1) // fits)


def statement(size: int = 1) -> CqlStatement:
    return CqlStatement("INSERT", [b"x" * size])


def test_groups_share_a_batch_up_to_its_bytes_and_rows() -> None:
    def sizes(groups: list[tuple[int, int]], rows_max: int = 4) -> list[int]:
        found = bounded(((size, [statement()] * count) for size, count in groups), rows_max)
        return [len(batch) for batch in found]

    assert sizes([(1, 2), (1, 2), (1, 1)]) == [4, 1]
    assert sizes([(1, 3), (1, 2)]) == [3, 2]
    half = BATCH_BYTES_MAX // 2
    assert sizes([(half, 1), (half, 1), (1, 1)]) == [2, 1]
    assert sizes([(half, 1), (half + 1, 1), (half - 1, 1), (1, 1)]) == [1, 2, 1]
    assert sizes([(3 * BATCH_BYTES_MAX, 1), (1, 1)]) == [1, 1]
    assert sizes([(1, 9)]) == [9]
    assert sizes([]) == []


def test_small_batches_are_combined_up_to_their_partitions_bytes_and_rows() -> None:
    def sizes(batches: list[Batch], partitions_max: int = 3, rows_max: int | None = None) -> list[int]:
        return [len(batch) for batch in coalesce_batches(batches, partitions_max, rows_max=rows_max)]

    one = [statement()]
    assert sizes([one] * 7) == [3, 3, 1]
    assert sizes([one] * 3, partitions_max=1) == [1, 1, 1]
    assert sizes([[statement()] * COALESCED_BATCH_ROWS_MAX, one]) == [COALESCED_BATCH_ROWS_MAX + 1]
    assert sizes([one, [statement()] * (COALESCED_BATCH_ROWS_MAX + 1), one]) == [COALESCED_BATCH_ROWS_MAX + 1, 2]
    assert sizes([one * 2, one * 2, one], rows_max=4) == [4, 1]
    assert sizes([one * 2, one * 3], rows_max=4) == [2, 3]
    # A value takes 16 bytes in addition.
    half = COALESCED_BYTES_MAX // 2 - 16
    assert sizes([[statement(half)], [statement(half)], one]) == [2, 1]
    assert sizes([[statement(half)], [statement(half + 1)], [statement(1)]]) == [1, 2]
    number = [CqlStatement("INSERT", [5])]
    assert sizes([[statement(COALESCED_BYTES_MAX - 16 - 24)], number]) == [2]
    assert sizes([[statement(COALESCED_BYTES_MAX - 16 - 23)], number]) == [1, 1]


def ids_of(segment: int, count: int, segments: int = 4) -> list[str]:
    """Return this many ids of one segment."""
    found: list[str] = []
    n = 0
    while len(found) < count:
        if head_segment(f"j-{n}", segments) == segment:
            found.append(f"j-{n}")
        n += 1
    return found


def test_heads_are_read_one_segment_at_a_time_or_over_several_with_few_heads_each() -> None:
    few = SEGMENTS_QUERY_IDS_MAX // 2

    def requested(*counts: int, partitions_max: int = 10) -> list[tuple[str, object, int]]:
        ids = [id for segment, count in enumerate(counts) for id in ids_of(segment, count)]
        queries = list(head_queries("t", ids, 4, partitions_max=partitions_max))
        assert sorted(id for query in queries for id in query.values[2]) == sorted(ids)
        assert all(query.values[0] == "t" for query in queries)
        return [(query.cql, query.values[1], len(query.values[2])) for query in queries]

    assert requested(few) == [(cql.HEADS, 0, few)]
    assert requested(few, few) == [(cql.HEADS_OF_SEGMENTS, [0, 1], 2 * few)]
    assert requested(few, few, 2) == [(cql.HEADS_OF_SEGMENTS, [0, 1], 2 * few), (cql.HEADS, 2, 2)]
    assert requested(few, few, 1) == [(cql.HEADS_OF_SEGMENTS, [0, 1, 2], 2 * few + 1)]
    assert requested(few + 1, 1, 1) == [(cql.HEADS, 0, few + 1), (cql.HEADS_OF_SEGMENTS, [1, 2], 2)]
    assert requested(1, 1, 1, 1, partitions_max=2) == [
        (cql.HEADS_OF_SEGMENTS, [0, 1], 2), (cql.HEADS_OF_SEGMENTS, [2, 3], 2),
    ]  # fmt: skip
    assert requested(1, 1, partitions_max=1) == [(cql.HEADS, 0, 1), (cql.HEADS, 1, 1)]
    most = HEADS_PER_QUERY_MAX
    assert requested(2 * most + 1) == [(cql.HEADS, 0, most), (cql.HEADS, 0, most), (cql.HEADS, 0, 1)]


def test_heads_of_one_segment_share_batches_up_to_their_rows() -> None:
    ids = ids_of(0, BATCH_ROWS_MAX + 1, segments=2)
    writes = [PutHead(Key("t", id), head_of(1, 10)) for id in [*ids, ids_of(1, 1, segments=2)[0]]]
    batches = list(head_batches(writes, 2, tags={}))
    assert sorted(len(batch) for batch in batches) == [1, 1, BATCH_ROWS_MAX]
    assert all(len({tuple(each.values[:2]) for each in batch}) == 1 for batch in batches)
