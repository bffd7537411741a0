"""Small requests to several partitions are combined, within the limits above which a node warns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.segments import head_segment
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import (
    COALESCED_BATCH_ROWS_MAX,
    COALESCED_BYTES_MAX,
    HEADS_PER_QUERY_MAX,
    SEGMENTS_QUERY_IDS_MAX,
    Batch,
    CqlStatement,
    coalesce_batches,
    head_queries,
)

#: The default of `batch_size_warn_threshold`.
WARNED_OF_BYTES = 5 * 1024


def batch_of(partition: int, rows: int, size: int) -> Batch:
    return [CqlStatement(cql.PUT_EVENT, [partition, row, b"x" * size]) for row in range(rows)]


def put_head(id: str, data: bytes) -> CqlStatement:
    return CqlStatement(cql.PUT_HEAD, ["orders", 7, id, data, True, 50, 0, 1, 100, 0, 1 << 51])


def bytes_of_head(statement: CqlStatement) -> int:
    """Return a row's size as a node counts it: the clustering, 16 bytes plus the value per cell, and the stamps."""
    _, _, id, data, *_ = statement.values
    return len(id) + (16 + len(data)) + (16 + 1) + 4 * (16 + 8) + (16 + 4) + 32


@given(
    st.lists(
        st.tuples(st.integers(1, 2 * COALESCED_BATCH_ROWS_MAX), st.integers(0, 2 * COALESCED_BYTES_MAX)), max_size=50
    ),
    st.integers(1, 12),
)
def test_every_statement_is_sent_once_and_groups_stay_within_their_bounds(
    batches: list[tuple[int, int]], partitions_max: int
) -> None:
    given_batches = [batch_of(i, rows, size) for i, (rows, size) in enumerate(batches)]
    found = list(coalesce_batches(given_batches, partitions_max))
    sent = [(each.values[0], each.values[1]) for batch in found for each in batch]
    assert sorted(sent) == [(each.values[0], each.values[1]) for batch in given_batches for each in batch]
    for batch in found:
        partitions = {each.values[0] for each in batch}
        assert len(partitions) <= partitions_max
        if len(partitions) > 1:
            assert sum(len(each.values[2]) for each in batch) <= COALESCED_BYTES_MAX


@given(st.lists(st.tuples(st.integers(60, 900), st.integers(1, 40)), max_size=60))
def test_combined_heads_stay_below_the_warning_limit_of_a_node(heads: list[tuple[int, int]]) -> None:
    batches = [[put_head("i" * id_length, b"h" * size)] for size, id_length in heads]
    for batch in coalesce_batches(batches, 10):
        assert len(batch) == 1 or sum(map(bytes_of_head, batch)) <= WARNED_OF_BYTES


def test_ten_small_heads_are_combined() -> None:
    batches = [[put_head(f"j-{i}", b"h" * 200)] for i in range(20)]
    assert [len(batch) for batch in coalesce_batches(batches, 10)] == [10, 10]


def test_a_group_of_one_sends_every_batch_by_itself() -> None:
    batches = [batch_of(i, 1, 10) for i in range(5)]
    assert list(coalesce_batches(batches, 1)) == batches


@given(st.lists(st.integers(1, 4), max_size=40), st.integers(4, 12))
def test_a_group_has_no_more_rows_than_a_batch_may_have(rows: list[int], rows_max: int) -> None:
    batches = [batch_of(i, count, 10) for i, count in enumerate(rows)]
    found = list(coalesce_batches(batches, 10, rows_max=rows_max))
    assert [each for batch in found for each in batch] == [each for batch in batches for each in batch]
    assert all(len(batch) <= rows_max for batch in found)


@given(st.sets(st.text(min_size=1, max_size=5), max_size=400), st.integers(1, 600), st.integers(1, 12))
def test_every_head_is_queried_once_in_its_segment(ids: set[str], segments: int, partitions_max: int) -> None:
    requested: list[str] = []
    for statement in head_queries("orders", sorted(ids), segments, partitions_max=partitions_max):
        query, (topic, where, wanted) = statement.cql, statement.values
        assert topic == "orders"
        several = where if query == cql.HEADS_OF_SEGMENTS else [where]
        assert {head_segment(id, segments) for id in wanted} == set(several)
        assert len(several) <= partitions_max
        assert len(wanted) <= (HEADS_PER_QUERY_MAX if len(several) == 1 else SEGMENTS_QUERY_IDS_MAX)
        requested += wanted
    assert sorted(requested) == sorted(ids)
