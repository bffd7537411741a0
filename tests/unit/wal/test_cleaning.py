"""What the cleaner may remove."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.wal.facts import A, Held, folded, histories, part, write
from tidebook.wal.cleaning import copies_needed, decide_cut, pinned_tables
from tidebook.wal.meta import RegionMeta, fold
from tidebook.wal.record import Claim, Mark
from tidebook.wal.snapshot import Stored, restore_meta, take_snapshot


def stored(reach: int, at: int, *, topic_id: str = "t") -> Stored:
    meta = RegionMeta()
    meta.next_offset = reach
    return Stored(take_snapshot(meta, topic_id=topic_id, truncated_to=0, taken_ms=0), at, at)


SNAPSHOTS = st.lists(st.integers(0, 50), max_size=6).map(
    lambda reaches: [stored(reach, at) for at, reach in enumerate(reaches)]
)


@given(SNAPSHOTS, st.integers(0, 50))
def test_two_snapshots_always_stay_that_need_nothing_below_the_cut(snapshots: list[Stored], wanted: int) -> None:
    cut = decide_cut(snapshots, topic_id="t", wanted=wanted)
    if len(snapshots) < 2:
        assert cut is None
        return
    assert cut is not None
    assert cut.data_before <= wanted
    left = [each for each in snapshots if each.first_offset >= cut.meta_before]
    assert sum(each.snapshot.data_offset >= cut.data_before for each in left) >= 2


@given(SNAPSHOTS, st.integers(0, 50))
def test_the_copies_that_are_needed_allow_the_whole_cut(snapshots: list[Stored], wanted: int) -> None:
    copies = copies_needed(snapshots, topic_id="t", wanted=wanted)
    more = [stored(max(wanted, 50), 10 + number) for number in range(copies)]
    cut = decide_cut([*snapshots, *more], topic_id="t", wanted=wanted)
    assert cut is not None
    assert cut.data_before == wanted


def test_a_late_snapshot_of_a_zombie_never_drives_out_those_that_reach_further() -> None:
    mine = [stored(900, 20), stored(950, 30)]
    late = [stored(500, 40), stored(510, 41)]
    cut = decide_cut([*mine, *late], topic_id="t", wanted=2000)
    assert cut is not None
    assert (cut.data_before, cut.meta_before) == (900, 20)


def test_snapshots_of_another_life_of_the_topic_do_not_count() -> None:
    assert decide_cut([stored(5, 0), stored(9, 1, topic_id="old")], topic_id="t", wanted=3) is None
    assert copies_needed([stored(9, 0, topic_id="old")], topic_id="t", wanted=3) == 2


@given(histories(), st.data())
def test_a_decision_never_grows_old(history: list[Held], data: st.DataObject) -> None:
    early = folded(history[: data.draw(st.integers(0, len(history)))])
    late = folded(history)
    assert late.first_offset >= min(early.first_offset, early.next_offset)


@given(histories(), st.data())
def test_a_region_cut_at_any_decision_recovers_from_each_snapshot_behind_it(
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
    meta = folded([(0, Claim(1, A)), (1, write(1, A, part(5, 1))), (2, write(1, A, part(3, 1, 2)))])
    assert [(p.table, p.first_seq, p.offset) for p in pinned_tables(meta)] == [(5, 1, 1), (3, 1, 2)]
    fold(meta, 3, 100, Mark(5, 1, 2))
    assert [p.table for p in pinned_tables(meta)] == [3]
    assert meta.first_offset == 2


@given(st.lists(st.integers(1, 5000), max_size=400), st.data())
def test_held_bytes_are_never_too_few_and_not_much_too_many(sizes: list[int], data: st.DataObject) -> None:
    meta = RegionMeta()
    for offset, size in enumerate(sizes):
        fold(meta, offset, size, Claim(offset + 1, A))
    offset = data.draw(st.integers(0, len(sizes)))
    real, told = sum(sizes[offset:]), meta.meter.bytes_from(offset)
    assert real <= told
    if sizes:
        assert told - real <= max(2 * 1024, sum(sizes) / 16) + 2 * max(sizes)
