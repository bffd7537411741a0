"""Positions order the records of a journal across epochs of its topic; write stamps are derived from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.position import START, Position, tombstone_stamp, write_stamp

OFFSET_MAX = 2**47 - 1
EPOCH_MAX = 2**12 - 1
REV_MAX = 2**3 - 1
#: A time of 2026 in microseconds, as a store would assign it by default.
NOW_US = 1_790_000_000_000_000

positions = st.builds(Position, st.integers(1, EPOCH_MAX), st.integers(0, OFFSET_MAX))
revs = st.integers(0, REV_MAX)


@given(positions, positions)
def test_an_epoch_counts_more_than_any_offset(a: Position, b: Position) -> None:
    assert (a < b) == (a.epoch < b.epoch or (a.epoch == b.epoch and a.offset < b.offset))


@given(positions, positions, revs, revs)
def test_stamps_are_ordered_like_positions_for_all_revisions(a: Position, b: Position, i: int, j: int) -> None:
    if a < b:
        assert write_stamp(a, rev=i) < tombstone_stamp(b, rev=j)


@given(positions, revs)
def test_the_writes_of_a_record_survive_its_own_deletes(position: Position, rev: int) -> None:
    assert tombstone_stamp(position, rev=rev) < write_stamp(position, rev=rev)


@given(positions, st.integers(0, REV_MAX - 1))
def test_a_repair_overwrites_what_it_repairs(position: Position, rev: int) -> None:
    assert write_stamp(position, rev=rev) < tombstone_stamp(position, rev=rev + 1)


def test_the_stamp_is_the_formula_of_the_rules() -> None:
    assert write_stamp(Position(3, 77), rev=2) == 3 << 51 | 77 << 4 | 2 << 1 | 1
    assert tombstone_stamp(Position(3, 77), rev=2) == 3 << 51 | 77 << 4 | 2 << 1


def test_the_largest_stamp_fits_in_a_signed_64_bit_number() -> None:
    assert write_stamp(Position(EPOCH_MAX, OFFSET_MAX), rev=REV_MAX) == 2**63 - 1


def test_every_stamp_is_above_the_wall_clock() -> None:
    assert tombstone_stamp(Position(1, 0)) > NOW_US


@pytest.mark.parametrize(
    ("epoch", "offset", "rev"),
    [(0, 0, 0), (-1, 0, 0), (EPOCH_MAX + 1, 0, 0), (1, -1, 0), (1, OFFSET_MAX + 1, 0), (1, 0, REV_MAX + 1), (1, 0, -1)],
)
def test_a_value_that_exceeds_its_bits_is_refused(epoch: int, offset: int, rev: int) -> None:
    with pytest.raises(OverflowError):
        write_stamp(Position(epoch, offset), rev=rev)


def test_the_start_is_before_every_record() -> None:
    assert START.next == Position(1, 0)
    assert Position(1, 0) > START
