"""Which rows a repair and a delete rewrite because they share packed rows with what is repaired or deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

pytest.importorskip("acsylla")

from tests.unit.store.test_cassandra_scan import HEAD, SMALL, Table, appended
from tidebook.core.buckets import Buckets
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import (
    ClearEvents,
    EventRow,
    Pointer,
    PutEvents,
    SliceWrites,
    TagPosition,
    TagRow,
)
from tidebook.store.cassandra import repair as repairs
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.repair import SplitRows, repair_rounds, rows_after_delete, split_packed_rows
from tidebook.store.cassandra.rows import decode_rows
from tidebook.store.cassandra.scan import EventPages

POINTER = Pointer(Position(1, 50), 77)


def head_of(last: int, *, delete_to: int = 0, segment_size: int = 10) -> Head:
    return msgspec.structs.replace(HEAD, seq_nr=last, delete_to=delete_to, segment_size=segment_size)


def repair_of(last: int, rows: Sequence[EventRow] = (), **given: Any) -> Repair:
    return Repair(key=SMALL, partition=0, pointer=POINTER, rev=2, head=head_of(last), rows=tuple(rows), **given)


class Counted(Table):
    """A table that records the ranges that are read."""

    def __init__(self, rows: Sequence[EventRow]) -> None:
        super().__init__(rows)
        self.ranges: list[tuple[int, int, int]] = []

    async def read(self, query: str, values: Sequence[Any], *, page_size: int) -> Any:
        self.ranges.append((values[2], values[3], values[4] - 15))
        return await super().read(query, values, page_size=page_size)


async def split(table: Table, repair: Repair) -> tuple[list[int], list[int]]:
    found = await split_packed_rows(EventPages(table), repair)  # type: ignore[arg-type]
    return [row.seq_nr for row in found.others], sorted(found.row_numbers)


# ---- repairs


async def test_the_other_events_of_a_packed_row_are_rewritten_with_the_repaired_one() -> None:
    rows = appended([4, 4, 1, 1])
    assert await split(Table(rows), repair_of(10, [rows[5]])) == ([5, 7, 8], [8])
    assert await split(Table(rows), repair_of(10, [rows[7]])) == ([5, 6, 7], [8])
    assert await split(Table(rows), repair_of(10, extra_rows=(1, 6))) == ([2, 3, 4, 5, 7, 8], [4, 8])


async def test_repairing_events_in_rows_of_their_own_rewrites_no_others() -> None:
    rows = appended([4, 1, 1, 4])
    assert await split(Table(rows), repair_of(10, [rows[4], rows[5]])) == ([], [])
    assert await split(Table(rows), repair_of(10)) == ([], [])


async def test_every_page_of_a_segment_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "PAGE_ROWS", 1)
    rows = appended([2, 2, 2, 2, 2, 2])
    table = Counted(rows)
    assert await split(table, repair_of(12, [rows[0], rows[7], rows[10]])) == ([2, 7, 12], [2, 8, 12])
    assert {segment for segment, _, _ in table.ranges} == {0, 1}


async def test_a_row_that_cannot_be_decoded_is_replaced_without_being_read() -> None:
    """It may hold more events than its last one, so it is replaced after all other writes."""
    rows = appended([1] * 60)
    head = head_of(60, segment_size=100)
    table = Counted(rows)
    table.cells = {(0, number): cell for (_, number), cell in table.cells.items()}
    for number in (30, 31):
        table.cells[0, number] = b"\xc1damaged"
    damaged = frozenset({30, 31, 59})
    repair = Repair(
        key=SMALL, partition=0, pointer=POINTER, rev=2, head=head, rows=tuple(rows[29:45]), damaged_rows=damaged
    )
    assert await split(table, repair) == ([], [30, 31])
    assert [after for _, after, _ in table.ranges][-1] >= 31
    assert all(to < 30 or after >= 31 for _, after, to in table.ranges)


def test_the_ranges_between_damaged_rows_end_well_before_them() -> None:
    assert list(repairs._around([], 5, 40)) == [(5, 40)]
    assert list(repairs._around([30, 5, 60], 5, 40)) == [(5, 14), (30, 40)]
    assert list(repairs._around([55, 56], 5, 40)) == [(5, 39), (55, 40)]
    assert list(repairs._around([6], 5, 40)) == [(5, -10), (6, 40)]


def place(tag: str, time_ms: int = 7) -> TagPosition:
    return TagPosition(tag, time_ms, SMALL.topic, 0, 3, 0, 1)


def tag_row(row: EventRow) -> TagRow:
    at = row.position
    return TagRow(
        "paid", 7, SMALL.topic, 0, at.offset, row.index, at.epoch, SMALL.id, 1, 0, 1, row.seq_nr, 5, row.encoded
    )


def test_a_repair_replaces_packed_rows_last_and_removes_extra_rows_with_its_revision() -> None:
    rows = appended([4, 4])
    repair = repair_of(
        8, [rows[5], rows[7]], extra_rows=(9, 10), extra_tags=(place("gone"),), tags=(tag_row(rows[5]),), segments=()
    )
    others = SplitRows((rows[4], rows[6]), frozenset({8, 10}))
    rounds = [[each for batch in batches for each in batch] for batches in repair_rounds(repair, 4, Buckets(), others)]
    names = [[each.cql for each in of_round] for of_round in rounds]
    assert names == [
        [],
        [cql.CLEAR_TAG],
        [cql.PUT_EVENT] * 3,
        [cql.PUT_EVENT],
        [cql.CLEAR_EVENT] * 2,
        [cql.PUT_TAG, cql.PUT_TAG_BUCKET],
        [cql.PUT_TAG_PROGRESS, cql.PUT_HEAD],
    ]
    numbers = [[decode_rows([each.values[4]])[0].seq_nr for each in rounds[at]] for at in (2, 3)]
    assert numbers == [[5, 6, 7], [8]]
    assert all(len(decode_rows([each.values[4]])) == 1 for at in (2, 3) for each in rounds[at])
    assert [(each.values[3], each.values[4]) for each in rounds[4]] == [(0, 9), (0, 10)]
    written, removed = write_stamp(POINTER.position, rev=2), tombstone_stamp(POINTER.position, rev=2)
    assert {each.values[-1] for at in (2, 3, 5, 6) for each in rounds[at]} == {written}
    assert {each.values[0] for at in (1, 4) for each in rounds[at]} == {removed}
    assert removed < written


def test_a_row_that_is_written_again_is_not_removed() -> None:
    rows = appended([2])
    repair = repair_of(2, [rows[1]], extra_rows=(2, 3))
    rounds = repair_rounds(repair, 4, Buckets(), SplitRows((rows[0],), frozenset({2})))
    removed = [
        each.values[4] for batches in rounds for batch in batches for each in batch if each.cql == cql.CLEAR_EVENT
    ]
    assert removed == [3]


def test_an_extra_row_is_removed_in_its_own_segment() -> None:
    repair = repair_of(30, extra_rows=(10, 11, 21))
    rounds = repair_rounds(repair, 4, Buckets(), SplitRows())
    removed = [
        each.values[3:] for batches in rounds for batch in batches for each in batch if each.cql == cql.CLEAR_EVENT
    ]
    assert removed == [[0, 10], [1, 11], [2, 21]]


# ---- deletes


async def after_delete(table: Table, head: Head, *, above: int = 0, put: Sequence[EventRow] = ()) -> list[int] | None:
    key = Key("t", "small")
    clear = ClearEvents(key, head, above)
    writes: tuple[Any, ...] = (clear, PutEvents(key, head, tuple(put))) if put else (clear,)
    of_slice = SliceWrites("t", 0, None, Pointer(Position(1, 9), 5), (writes,))
    found = await rows_after_delete(EventPages(table), of_slice, at_once=2)  # type: ignore[arg-type]
    return [row.seq_nr for row in found[key]] if key in found else None


async def test_a_delete_rewrites_only_the_rest_of_the_row_that_it_cuts() -> None:
    rows = appended([4, 4, 2])
    for delete_to, left in ((1, [2, 3, 4]), (3, [4]), (4, None), (5, [6, 7, 8]), (9, [10])):
        assert await after_delete(Table(rows), head_of(10, delete_to=delete_to)) == left, delete_to


async def test_a_delete_of_nothing_or_of_all_cuts_no_row() -> None:
    table = Counted(appended([4, 4]))
    for delete_to in (0, 8):
        assert await after_delete(table, head_of(8, delete_to=delete_to)) is None
    assert table.ranges == []


async def test_a_row_that_was_cut_before_is_rewritten_again() -> None:
    """A late replicator that has folded fewer records may still write the whole row."""
    rows = [row for row in appended([4, 4]) if row.seq_nr not in (5, 6)]
    assert await after_delete(Table(rows), head_of(8, delete_to=6)) == [7, 8]
    assert await after_delete(Table(rows), head_of(8, delete_to=4)) is None


async def test_rows_of_another_incarnation_or_of_later_records_are_not_rewritten() -> None:
    rows = appended([4, 4])
    head = head_of(8, delete_to=6)
    at = rows[5].position
    for incarnation, position, left in (
        (at, at, [7, 8]),
        (Position(1, at.offset + 1), Position(1, 9), None),
        (Position(1, 0), Position(1, at.offset - 1), None),
    ):
        of_head = msgspec.structs.replace(head, incarnation=incarnation, position=position)
        assert await after_delete(Table(rows), of_head) == left


async def test_the_rest_of_a_row_in_the_next_segment_has_a_row_of_its_own() -> None:
    rows = appended([6, 8])
    assert await after_delete(Table(rows), head_of(14, delete_to=10)) is None
    assert await after_delete(Table(rows), head_of(14, delete_to=9)) == [10]


async def test_events_that_the_slice_itself_writes_belong_to_the_row_too() -> None:
    position = Position(1, 3)
    put = [EventRow(2 + index, b"%d" % index, 5, position, 2 + index, 6) for index in range(4)]
    head = head_of(5, delete_to=1)
    assert await after_delete(Table([]), head, put=put) == [2, 3, 4, 5]
    other = [EventRow(6, b"", 5, Position(1, 4), 0, 6)]
    assert await after_delete(Table([]), head_of(6, delete_to=1), put=[*put, *other]) == [2, 3, 4, 5]
    fresh = [EventRow(2 + index, b"%d" % index, 5, position, index, 6) for index in range(4)]
    assert await after_delete(Table([]), head, put=fresh) is None
    assert await after_delete(Table([]), head_of(90, delete_to=1), put=[row for row in put if row.seq_nr > 60]) is None


async def test_only_the_events_of_the_cut_row_are_rewritten_from_a_slice() -> None:
    """The events 16 to 31 of a record are in one row, and the next ones in another."""
    position = Position(1, 3)
    put = [EventRow(2 + n, b"%d" % n, 5, position, 17 + n, 6) for n in range(20)]
    head = head_of(30, delete_to=1, segment_size=100)
    assert await after_delete(Table([]), head, put=put) == list(range(2, 17))
