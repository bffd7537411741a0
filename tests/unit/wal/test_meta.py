"""The fold: which records are valid, and how they change the state."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.unit.wal.fold_model import A, B, Held, folded, histories, naive, part, state_of, write
from tidebook.wal.meta import RegionMeta, Verdict, fold
from tidebook.wal.record import DamagedWalRecord, DropTable, MarkDeleted, OwnerClaim


@given(histories())
def test_the_fold_agrees_with_the_naive_model(history: list[Held]) -> None:
    assert state_of(folded(history)) == naive(history)


def test_the_first_number_is_1_and_the_first_mark_is_0() -> None:
    table = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(7, 1)))]).tables[7]
    assert list(table.mapping) == [1]
    assert table.latest_marked_deleted == 0


def test_a_claim_is_valid_only_above_the_term_in_force() -> None:
    meta = folded([(0, OwnerClaim(5, A))])
    assert fold(meta, 1, 0, OwnerClaim(5, B)) is Verdict.FENCED
    assert (meta.term, meta.writer) == (5, A)
    assert fold(meta, 2, 0, OwnerClaim(6, B)) is Verdict.VALID
    assert (meta.term, meta.writer) == (6, B)


def test_a_write_is_valid_only_under_the_claim_in_force() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1))), (2, OwnerClaim(2, B))])
    assert fold(meta, 3, 0, write(1, A, part(1, 2))) is Verdict.FENCED
    assert fold(meta, 4, 0, write(2, A, part(1, 2))) is Verdict.FENCED
    assert fold(meta, 5, 0, write(2, B, part(1, 2))) is Verdict.VALID
    assert dict(meta.tables[1].mapping) == {1: 1, 2: 5}


def test_a_duplicate_of_a_write_is_ignored() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1, 2)))])
    assert fold(meta, 2, 0, write(1, A, part(1, 1, 2))) is Verdict.OUT_OF_SEQUENCE
    assert dict(meta.tables[1].mapping) == {1: 1, 2: 1}


def test_a_write_after_a_gap_is_ignored_completely() -> None:
    meta = folded([(0, OwnerClaim(1, A))])
    assert fold(meta, 1, 0, write(1, A, part(2, 1), part(1, 2))) is Verdict.OUT_OF_SEQUENCE
    assert meta.tables == {}


def test_one_record_may_contain_a_table_twice() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1), part(2, 1), part(1, 2, 3)))])
    assert dict(meta.tables[1].mapping) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert meta.tables[1].mapping.batch_count == 1


def test_a_mark_deletes_only_the_entries_below_its_number() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1, 3))), (2, MarkDeleted(1, 1, 2))])
    assert dict(meta.tables[1].mapping) == {2: 1, 3: 1}
    assert meta.tables[1].latest_marked_deleted == 2


def test_a_mark_at_the_next_number_covers_all_entries_and_unpins_the_log() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1, 3))), (2, MarkDeleted(1, 1, 4))])
    assert dict(meta.tables[1].mapping) == {}
    assert meta.first_offset == 3
    assert meta.tables[1].next_seq_num == 4


def test_a_mark_does_not_cover_entries_that_are_not_written_yet() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1, 3))), (2, MarkDeleted(1, 1, 100))])
    assert meta.tables[1].latest_marked_deleted == 4


def test_a_mark_never_moves_back() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1, 3))), (2, MarkDeleted(1, 1, 3))])
    assert fold(meta, 3, 0, MarkDeleted(1, 1, 2)) is Verdict.NO_EFFECT
    assert meta.tables[1].latest_marked_deleted == 3


def test_a_late_mark_or_drop_does_not_change_a_recreated_table() -> None:
    meta = folded(
        [(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1))), (2, DropTable(1, 1)), (3, write(1, A, part(1, 1)))]
    )
    assert fold(meta, 4, 0, MarkDeleted(1, 1, 2)) is Verdict.NO_EFFECT
    assert fold(meta, 5, 0, DropTable(1, 1)) is Verdict.NO_EFFECT
    assert dict(meta.tables[1].mapping) == {1: 3}


def test_marks_and_drops_are_valid_at_any_term() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1), part(2, 1))), (2, OwnerClaim(2, B))])
    assert fold(meta, 3, 0, MarkDeleted(1, 1, 2)) is Verdict.VALID
    assert fold(meta, 4, 0, DropTable(2, 1)) is Verdict.VALID


def test_a_damaged_record_is_skipped() -> None:
    meta = folded([(0, OwnerClaim(1, A))])
    assert fold(meta, 1, 0, DamagedWalRecord("x")) is Verdict.DAMAGED
    assert meta.next_offset == 2


def test_no_record_is_folded_twice() -> None:
    meta = folded([(0, OwnerClaim(1, A))])
    with pytest.raises(AssertionError):
        fold(meta, 0, 0, OwnerClaim(2, A))


@given(histories())
def test_a_frozen_meta_does_not_change(history: list[Held]) -> None:
    half = len(history) // 2
    meta = folded(history[:half])
    view, before = meta.frozen(), state_of(meta)
    folded(history[half:], meta)
    assert state_of(view) == before


def test_the_memory_of_the_meta_is_bounded_by_batches() -> None:
    meta = RegionMeta()
    fold(meta, 0, 0, OwnerClaim(1, A))
    for batch in range(10_000):
        fold(meta, batch + 1, 100_000, write(1, A, part(1, 1 + batch * 100, 100)))
    held = meta.tables[1].mapping
    assert held.size_bytes / (len(held) / 1000) <= 100
    assert len(meta.byte_index.offsets) <= 128
