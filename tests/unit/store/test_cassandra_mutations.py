"""A slice as CQL: bounded batches of one partition each, with stamps derived from the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.buckets import Buckets
from tidebook.core.event import Event, encode_event
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    EventRow,
    ForgetSegments,
    Parked,
    Pointer,
    PutEvents,
    PutHead,
    PutSegments,
    PutTags,
    SliceWrites,
    plan_key,
    tag_row,
)
from tidebook.core.segments import event_segment
from tidebook.core.topic_config import TopicConfig
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    PARKED_BYTES_MAX,
    PROGRESS_WITH_HEAD_MAX,
    Batch,
    CqlStatement,
    batch_rounds,
    clear_events,
    clear_graves,
    clear_journal,
    event_batches,
    head_batches,
    parked_row,
    repair_segments,
    segment_batches,
)
from tidebook.store.cassandra.rows import EVENTS_PER_ROW_MAX, decode_rows, decode_rows_of
from tidebook.store.cassandra.tag_writes import tag_batches
from tidebook.store.cassandra.tag_writes import tag_row as read_tag_row

KEY = Key("orders", "o-1")
AT = Position(2, 77)
CONFIG = TopicConfig(topic_id="t", partitions=1, segment_size=10)


def head_of(seq_nr: int, *, delete_to: int = 0, live: bool = True, size: int = 10, run_start: int = 0) -> Head:
    return Head(live, seq_nr, delete_to, Position(1, 3), AT, size, None, 0, (), None, (), {}, run_start)


def rows_of(sizes: list[int], first: int = 1) -> tuple[EventRow, ...]:
    return tuple(EventRow(first + i, b"x" * size, 5, Position(1, i), 0) for i, size in enumerate(sizes))


def row_cells(batches: Iterable[Batch]) -> dict[tuple[int, int], bytes]:
    """Return cells by segment and number."""
    return {(each.values[2], each.values[3]): each.values[4] for batch in batches for each in batch}


def partition_of(batch: Batch) -> set[tuple[Any, ...]]:
    return {tuple(statement.values[:3]) for statement in batch}


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=250), st.integers(1, 40), st.integers(1, 40))
def test_event_batches_hold_one_partition_and_stay_within_bytes_and_rows(
    sizes: list[int], first: int, size: int
) -> None:
    rows = rows_of(sizes, first)
    batches = list(event_batches(PutEvents(KEY, head_of(len(sizes) + first, size=size), rows)))
    assert [row for batch in batches for row in decode_rows([each.values[4] for each in batch])] == list(rows)
    for batch in batches:
        assert len(partition_of(batch)) == 1
        assert len(batch) <= BATCH_ROWS_MAX
        assert len(batch) == 1 or sum(len(each.values[4]) for each in batch) <= BATCH_BYTES_MAX


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=10), st.integers(1, 40), st.integers(1, 40), st.integers(0, 60)
)
def test_events_of_a_record_are_packed_alike_by_every_replicator(
    counts: list[int], first: int, size: int, left_out: int
) -> None:
    rows: list[EventRow] = []
    for at, count in enumerate(counts):
        position, seq_nr = Position(1, at), first + len(rows)
        rows += [EventRow(seq_nr + i, b"%d" % i, 5, position, i, 6) for i in range(count)]
    head = head_of(first + len(rows), size=size)
    cells = row_cells(event_batches(PutEvents(KEY, head, tuple(rows))))
    assert decode_rows(cells.values()) == rows
    for (segment, number), cell in cells.items():
        held = decode_rows([cell])
        assert held[-1].seq_nr == number
        assert {event_segment(row.seq_nr, size) for row in held} == {segment}
        assert len({(row.position, row.index // EVENTS_PER_ROW_MAX) for row in held}) == 1
    # A replicator that omits deleted events writes the same rows, except that the first may be partial.
    some = row_cells(event_batches(PutEvents(KEY, head, tuple(rows[left_out:]))))
    assert some.keys() <= cells.keys()
    assert all(cells[at] == cell for at, cell in [*some.items()][1:])
    # With equal stamps Cassandra keeps the greater bytes, which are those of the complete row.
    assert all(cells[at] >= cell for at, cell in some.items())


def test_only_consecutive_events_are_packed() -> None:
    position = Position(1, 0)
    rows = tuple(EventRow(number, b"x", 5, position, index) for number, index in ((1, 0), (3, 1), (4, 2), (5, 4)))
    cells = row_cells(event_batches(PutEvents(KEY, head_of(5), rows)))
    assert [number for _, number in cells] == [1, 4, 5]
    assert decode_rows(cells.values()) == list(rows)


def test_a_packed_row_replaces_single_rows_of_its_numbers() -> None:
    """An older version wrote one row per event, and one of its slices is replicated again."""
    position = Position(1, 0)
    rows = tuple(EventRow(1 + i, b"x", 5, position, i) for i in range(4))
    together = [*row_cells(event_batches(PutEvents(KEY, head_of(4), rows))).values()]
    singly = [*row_cells(event_batches(PutEvents(KEY, head_of(4), rows), packed=False)).values()]
    assert (len(together), len(singly)) == (1, 4)
    assert decode_rows([*singly[:3], *together]) == list(rows)
    found = decode_rows_of([("a", singly[2]), *(("b", cell) for cell in [*singly[:3], *together])])
    assert found == [("a", rows[2]), *(("b", row) for row in rows)]


def test_an_event_over_the_bound_is_sent_alone() -> None:
    write = PutEvents(KEY, head_of(3, size=1000), rows_of([10, 1_000_000, 10]))
    assert [len(batch) for batch in event_batches(write)] == [1, 1, 1]


def test_rows_carry_the_stamp_of_their_own_record() -> None:
    [batch] = event_batches(PutEvents(KEY, head_of(3), rows_of([1, 1, 1])))
    assert [each.values[-1] for each in batch] == [write_stamp(Position(1, i)) for i in range(3)]


def test_heads_of_one_segment_share_a_batch_and_are_whole_rows() -> None:
    writes = [PutHead(Key("orders", f"o-{i}"), head_of(i + 1)) for i in range(300)]
    batches = list(head_batches(writes, 4, tags={}))
    assert len(batches) == 4
    for batch in batches:
        assert len({tuple(each.values[:2]) for each in batch}) == 1
        for each in batch:
            assert None not in each.values
            assert each.values[-1] == write_stamp(AT)


def test_a_grave_and_a_journal_that_never_expires_write_every_column() -> None:
    [[statement]] = head_batches([PutHead(KEY, head_of(3, live=False))], 1, tags={})
    assert statement.values[4:10] == [False, 3, 0, 2, 77, 0]


def test_a_delete_clears_whole_segments_and_part_of_the_last_one() -> None:
    batches = list(clear_events(ClearEvents(KEY, head_of(40, delete_to=25), 3)))
    stamp = tombstone_stamp(AT)
    assert [tuple(batch[0].values) for batch in batches] == [
        (stamp, "o-1", "orders", 0),
        (stamp, "o-1", "orders", 1),
        (stamp, "o-1", "orders", 2, 25),
    ]
    assert batches[2][0].cql == cql.CLEAR_EVENTS


@pytest.mark.parametrize(("delete_to", "whole"), [(9, []), (10, [0]), (11, [0]), (20, [0, 1])])
def test_a_delete_that_ends_with_a_segment_clears_the_whole_segment(delete_to: int, whole: list[int]) -> None:
    head = Head(True, 25, delete_to, Position(1, 0), Position(1, 9), 10, None, 0, (), None, ())
    statements = [each for batch in clear_events(ClearEvents(Key("t", "a"), head, 0)) for each in batch]
    assert [each.values[3] for each in statements if each.cql == cql.CLEAR_SEGMENT] == whole
    rest = [each.values[3:] for each in statements if each.cql == cql.CLEAR_EVENTS]
    assert rest == ([] if delete_to % 10 == 0 else [[delete_to // 10, delete_to]])


def test_a_purge_clears_the_listed_segments_and_the_last_run() -> None:
    head = head_of(10**15 + 4, live=False, run_start=10**14 - 1)
    *segments, snapshots = clear_journal(ClearJournal(KEY, head), [0, 1, 7])
    assert [batch[0].values[3] for batch in segments] == [0, 1, 7, 10**14 - 1, 10**14]
    assert snapshots[0].values == [tombstone_stamp(AT), "orders", "o-1", 1, 3]


def test_a_purge_clears_from_the_first_segment_whatever_was_deleted() -> None:
    """A delete just before the purge may never have been applied."""
    *segments, _ = clear_journal(ClearJournal(KEY, head_of(35, delete_to=29, live=False)))
    assert [batch[0].values[3] for batch in segments] == [0, 1, 2, 3]


def test_a_delete_clears_the_listed_segments_too() -> None:
    batches = clear_events(ClearEvents(KEY, head_of(905, delete_to=905, run_start=90), 3), [0, 7])
    assert [tuple(batch[0].values[3:]) for batch in batches] == [(0,), (7,), (90, 905)]


def test_segments_are_listed_under_the_stamp_of_their_incarnation_and_unlisted_above() -> None:
    """So a late replicator cannot list a segment again, and unlisting reaches every listed segment."""
    write = PutSegments(KEY, head_of(905, run_start=90), (range(2), range(7, 8)))
    [batch] = segment_batches(write)
    assert [each.values for each in batch] == [
        ["o-1", "orders", 1, 3, segment, write_stamp(Position(1, 3))] for segment in (0, 1, 7)
    ]
    deleted, purged = (
        next(iter(batch_rounds(SliceWrites("orders", 0, None, Pointer(AT, 5), ((ForgetSegments(KEY, head),),)), 1)))
        for head in (head_of(905, delete_to=79, run_start=90), head_of(905, live=False, run_start=90))
    )
    [[statement]] = deleted
    assert (statement.cql, statement.values) == (cql.CLEAR_SEGMENTS, [tombstone_stamp(AT), "o-1", "orders", 1, 3, 7])
    [[statement]] = purged
    assert (statement.cql, statement.values) == (cql.CLEAR_ALL_SEGMENTS, [tombstone_stamp(AT), "o-1", "orders", 1, 3])


def test_a_repair_lists_the_segments_of_all_rows_before_the_last_run() -> None:
    rows = [EventRow(number, b"", 5, AT, 0) for number in (3, 75, 901)]
    for run_start, listed in ((90, (range(1), range(3, 4), range(7, 8))), (0, ())):
        repair = Repair(
            key=KEY, partition=0, pointer=Pointer(AT, 5), rev=1, head=head_of(905, run_start=run_start), segments=(0, 3)
        )
        assert repair_segments(repair, rows).segments == listed


def test_a_grave_is_removed_with_all_its_writes_and_without_later_ones() -> None:
    [[statement]] = clear_graves("orders", [("o-1", head_of(3, live=False))], 1)
    assert statement.values[1:] == ["orders", 0, "o-1"]
    assert write_stamp(AT, rev=7) <= statement.values[0] < tombstone_stamp(AT.next)


def test_a_long_parked_record_is_truncated_and_its_size_is_stored() -> None:
    parked = Parked("orders", 0, AT, 5, None, "too long", b"x" * (PARKED_BYTES_MAX + 1))
    first, _ = batch_rounds(SliceWrites("orders", 0, None, Pointer(AT, 5), (), (parked,)), 1)
    [[statement]] = first
    assert len(statement.values[7]) == PARKED_BYTES_MAX
    assert "4,000,001" in statement.values[6]
    assert statement.values[5] == ""
    assert parked_row(tuple(statement.values[:9])).whole_bytes == PARKED_BYTES_MAX + 1


def test_a_parked_record_that_just_fits_is_kept_unchanged() -> None:
    parked = Parked("orders", 0, AT, 5, "o-1", "damaged", b"x" * PARKED_BYTES_MAX)
    first, _ = batch_rounds(SliceWrites("orders", 0, None, Pointer(AT, 5), (), (parked,)), 1)
    [[statement]] = first
    assert parked_row(tuple(statement.values[:9])) == parked


def test_the_size_of_a_parked_record_is_never_read_from_its_reason() -> None:
    reason = "odd (kept: the first 4,000,000 of 5,000,000 bytes)"
    parked = Parked("orders", 0, AT, 5, "o-1", reason, b"xyz")
    first, _ = batch_rounds(SliceWrites("orders", 0, None, Pointer(AT, 5), (), (parked,)), 1)
    [[statement]] = first
    assert parked_row(tuple(statement.values[:9])) == parked


def test_rounds_keep_each_journals_order_and_end_with_the_pointer() -> None:
    incarnation = (PutHead(KEY, head_of(1, live=False)), ClearJournal(KEY, head_of(1, live=False)))
    other = Key("orders", "o-2")
    keys = (incarnation, (PutEvents(other, head_of(1), rows_of([1])), PutHead(other, head_of(1))))
    rounds = [
        [statement.cql for batch in each for statement in batch]
        for each in batch_rounds(SliceWrites("orders", 0, None, Pointer(AT, 5), keys), 1)
    ]
    assert rounds == [
        [cql.PUT_EVENT, cql.PUT_HEAD],
        [cql.CLEAR_SEGMENT, cql.CLEAR_SNAPSHOTS, cql.PUT_HEAD],
        [cql.PUT_POINTER],
    ]


def test_an_empty_slice_still_moves_the_pointer() -> None:
    [[[statement]]] = (list(each) for each in batch_rounds(SliceWrites("orders", 3, None, Pointer(AT, 5), ()), 1))
    assert statement == CqlStatement(cql.PUT_POINTER, ["orders", 3, 2, 77, 5, write_stamp(AT)])


def test_a_key_without_records_writes_nothing() -> None:
    assert plan_key(KEY, None, [], CONFIG) == ()


@pytest.mark.parametrize("text", [value for name, value in vars(cql).items() if name.isupper()])
def test_no_statement_has_both_a_derived_stamp_and_a_condition(text: str) -> None:
    assert not ("USING TIMESTAMP" in text and " IF " in text)


def tag_puts(count: int, *, id: str = "a", payload: bytes = b"x", tag: str = "paid", step_ms: int = 1) -> PutTags:
    key, at = Key("t", id), Position(1, 0)
    events = [
        EventRow(n + 1, encode_event(Event(payload, tags={tag})), 5, Position(1, n), 0, n * step_ms)
        for n in range(count)
    ]
    head = Head(True, count, 0, at, at, 10, None, 0, (), None, ())
    return PutTags(key, head, tuple(tag_row(tag, key, 0, at, n + 1, event) for n, event in enumerate(events)))


def tag_rows_by_batch(puts: PutTags, **options: int) -> list[list[tuple[object, object]]]:
    batches = tag_batches([puts], Buckets(), 4, **options)
    return [[tuple(each.values[:2]) for each in batch] for batch in batches if batch[0].cql == cql.PUT_TAG]


def test_tag_rows_are_written_in_bounded_batches_of_one_tag_and_bucket() -> None:
    batches = tag_rows_by_batch(tag_puts(25, step_ms=3_600_000 // 10), rows_max=4)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2, 4, 1]
    assert all(len(set(batch)) == 1 for batch in batches), "each batch is of one tag and bucket"


def test_tag_rows_of_many_journals_are_written_in_the_order_of_their_stream() -> None:
    batches = list(tag_batches([tag_puts(20), tag_puts(20, payload=b"y")], Buckets(), 4, rows_max=4))
    times = [each.values[2] for batch in batches for each in batch if each.cql == cql.PUT_TAG]
    assert times == [n // 2 for n in range(40)]


def test_tag_batches_are_split_by_bytes_and_a_single_larger_event_is_still_written() -> None:
    assert [len(batch) for batch in tag_rows_by_batch(tag_puts(10, payload=b"x" * (BATCH_BYTES_MAX // 3)))] == [2] * 5
    assert [len(batch) for batch in tag_rows_by_batch(tag_puts(2, payload=b"x" * (2 * BATCH_BYTES_MAX)))] == [1, 1]


def test_tag_progress_is_written_in_one_batch_with_the_head() -> None:
    puts = tag_puts(3)
    [batch] = head_batches([PutHead(puts.key, puts.head)], 4, tags={puts.key: puts})
    assert [each.cql for each in batch] == [cql.PUT_TAG_PROGRESS, cql.PUT_HEAD]
    assert batch[0].values[:2] == batch[1].values[:2], "one partition"
    assert batch[0].values[2:] == ["a", "paid", 3, 3, 1, 2, write_stamp(Position(1, 2))]
    assert not [each for each in tag_batches([puts], Buckets(), 4) if each[0].cql == cql.PUT_TAG_PROGRESS]


def test_a_head_and_its_progress_are_never_split() -> None:
    puts = [tag_puts(1, id=f"j-{n}") for n in range(150)]
    heads = [PutHead(put.key, put.head) for put in puts]
    batches = list(head_batches(heads, 1, tags={put.key: put for put in puts}))
    assert len(batches) > 1
    for batch in batches:
        assert len(batch) <= 100
        assert [each.values[2] for each in batch[::2]] == [each.values[2] for each in batch[1::2]]


def test_the_progress_of_many_tags_is_written_before_the_head_with_the_tag_rows() -> None:
    some = [tag_puts(1, tag=f"tag-{n}") for n in range(PROGRESS_WITH_HEAD_MAX + 1)]
    puts = PutTags(some[0].key, some[0].head, tuple(row for put in some for row in put.rows))
    [batch] = head_batches([PutHead(puts.key, puts.head)], 4, tags={puts.key: puts})
    assert [each.cql for each in batch] == [cql.PUT_HEAD]
    before = [each for batch in tag_batches([puts], Buckets(), 4) for each in batch if each.cql == cql.PUT_TAG_PROGRESS]
    assert [each.values[3] for each in before] == [f"tag-{n}" for n in range(PROGRESS_WITH_HEAD_MAX + 1)]


def test_the_progress_of_the_maximum_of_tags_is_written_with_the_head() -> None:
    some = [tag_puts(2, tag=f"tag-{n}") for n in range(PROGRESS_WITH_HEAD_MAX)]
    puts = PutTags(some[0].key, some[0].head, tuple(row for put in some for row in put.rows))
    [batch] = head_batches([PutHead(puts.key, puts.head)], 4, tags={puts.key: puts})
    assert [each.cql for each in batch] == [cql.PUT_TAG_PROGRESS] * PROGRESS_WITH_HEAD_MAX + [cql.PUT_HEAD]
    before = [each.cql for batch in tag_batches([puts], Buckets(), 4) for each in batch]
    assert cql.PUT_TAG_PROGRESS not in before


def test_a_tag_row_is_read_as_it_was_written_under_the_stamp_of_its_record() -> None:
    puts = tag_puts(3)
    written = [each for batch in tag_batches([puts], Buckets(), 4) for each in batch if each.cql == cql.PUT_TAG]
    assert [read_tag_row("paid", tuple(each.values[2:9])) for each in written] == list(puts.rows)
    assert [each.values[-1] for each in written] == [write_stamp(row.position) for row in puts.rows]


def test_a_tags_bucket_is_stored_under_the_stamp_of_its_newest_row() -> None:
    reported = [
        each.values
        for batch in tag_batches([tag_puts(25, step_ms=3_600_000 // 10)], Buckets(), 4)
        for each in batch
        if each.cql == cql.PUT_TAG_BUCKET
    ]
    hours = [(0, 9), (1, 19), (2, 24)]
    assert reported == [["paid", hour * 3_600_000, write_stamp(Position(1, newest))] for hour, newest in hours]
