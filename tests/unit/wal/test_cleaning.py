"""The cleaner truncates only records that no table and neither of the two newest snapshots needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.wal.fold_model import A, Held, folded, histories, part, write
from tidebook.wal.meta import RegionMeta, fold
from tidebook.wal.record import MarkDeleted, OwnerClaim
from tidebook.wal.snapshot import StoredSnapshotChunks, copies_needed, plan_truncation, restore_meta, take_snapshot


def stored(reach: int, at: int, *, topic_id: str = "t") -> StoredSnapshotChunks:
    meta = RegionMeta()
    meta.next_offset = reach
    return StoredSnapshotChunks(take_snapshot(meta, topic_id=topic_id, truncated_to=0, taken_ms=0), at)


SNAPSHOTS = st.lists(st.integers(0, 50), max_size=6).map(
    lambda reaches: [stored(reach, at) for at, reach in enumerate(reaches)]
)


@given(SNAPSHOTS, st.integers(0, 50))
def test_two_snapshots_that_need_nothing_below_the_truncation_are_kept(
    snapshots: list[StoredSnapshotChunks], wanted: int
) -> None:
    cut = plan_truncation(snapshots, topic_id="t", wanted=wanted)
    if len(snapshots) < 2:
        assert cut is None
        return
    assert cut is not None
    assert cut.data_before <= wanted
    left = [each for each in snapshots if each.first_offset >= cut.meta_before]
    assert sum(each.snapshot.data_offset >= cut.data_before for each in left) >= 2


@given(SNAPSHOTS, st.integers(0, 50))
def test_with_the_missing_snapshots_the_log_is_truncated_at_the_wanted_offset(
    snapshots: list[StoredSnapshotChunks], wanted: int
) -> None:
    copies = copies_needed(snapshots, topic_id="t", wanted=wanted)
    more = [stored(max(wanted, 50), 10 + number) for number in range(copies)]
    cut = plan_truncation([*snapshots, *more], topic_id="t", wanted=wanted)
    assert cut is not None
    assert cut.data_before == wanted


def test_a_late_snapshot_of_a_fenced_owner_does_not_replace_newer_ones() -> None:
    mine = [stored(900, 20), stored(950, 30)]
    late = [stored(500, 40), stored(510, 41)]
    cut = plan_truncation([*mine, *late], topic_id="t", wanted=2000)
    assert cut is not None
    assert (cut.data_before, cut.meta_before) == (900, 20)


def test_snapshots_of_another_incarnation_of_the_topic_are_ignored() -> None:
    assert plan_truncation([stored(5, 0), stored(9, 1, topic_id="old")], topic_id="t", wanted=3) is None
    assert copies_needed([stored(9, 0, topic_id="old")], topic_id="t", wanted=3) == 2


@given(histories(), st.data())
def test_a_decision_stays_valid_for_every_later_state(history: list[Held], data: st.DataObject) -> None:
    early = folded(history[: data.draw(st.integers(0, len(history)))])
    late = folded(history)
    assert late.first_offset >= min(early.first_offset, early.next_offset)


@given(histories(), st.data())
def test_a_region_truncated_at_any_decision_recovers_from_each_later_snapshot(
    history: list[Held], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(history)))
    meta = folded(history[:at])
    cut = meta.first_offset
    snapshot = take_snapshot(meta, topic_id="t", truncated_to=cut, taken_ms=0)
    kept = [(offset, record) for offset, record in history if offset >= cut]
    recovered = folded(kept, restore_meta(snapshot))
    whole = folded(history)
    assert {t: dict(m.mapping) for t, m in recovered.tables.items()} == {
        t: dict(m.mapping) for t, m in whole.tables.items()
    }
    offsets = {offset for offset, _ in kept}
    assert all(held in offsets for m in recovered.tables.values() for held in m.mapping.values())


def test_the_table_with_the_oldest_entry_pins_the_log() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(5, 1))), (2, write(1, A, part(3, 1, 2)))])
    assert [(p.table, p.first_seq, p.offset) for p in meta.pinned_tables()] == [(5, 1, 1), (3, 1, 2)]
    fold(meta, 3, 100, MarkDeleted(5, 1, 2))
    assert [p.table for p in meta.pinned_tables()] == [3]
    assert meta.first_offset == 2


@given(st.lists(st.integers(1, 5000), max_size=400), st.data())
def test_held_bytes_are_a_close_upper_bound(sizes: list[int], data: st.DataObject) -> None:
    meta = RegionMeta()
    for offset, size in enumerate(sizes):
        fold(meta, offset, size, OwnerClaim(offset + 1, A))
    offset = data.draw(st.integers(0, len(sizes)))
    real, reported = sum(sizes[offset:]), meta.byte_index.bytes_from(offset)
    assert real <= reported
    if sizes:
        assert reported - real <= max(2 * 1024, sum(sizes) / 16) + 2 * max(sizes)
