"""Snapshots: chunks, checksums, and the offset at which a recovery starts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.wal.fold_model import A, Held, folded, histories, part, state_of, write
from tidebook.core.errors import LogLost, UnknownVersion
from tidebook.core.frame import Frame
from tidebook.wal.mapping import SeqOffsets
from tidebook.wal.meta import RegionMeta, TableMeta, fold
from tidebook.wal.record import MarkDeleted, OwnerClaim
from tidebook.wal.snapshot import (
    FRAME,
    RegionSnapshot,
    StoredSnapshotChunks,
    check_complete,
    collect_snapshots,
    encode_snapshot,
    plan_recovery,
    restore_meta,
    take_snapshot,
)


def taken(meta: RegionMeta, *, topic_id: str = "t", truncated_to: int = 0) -> RegionSnapshot:
    return take_snapshot(meta, topic_id=topic_id, truncated_to=truncated_to, taken_ms=0)


def chunks(snapshot: RegionSnapshot, number: int, limit_bytes: int = 200) -> list[bytes]:
    return encode_snapshot(snapshot, snapshot_id=number.to_bytes(16, "big"), limit_bytes=limit_bytes)


def stored(*snapshots: RegionSnapshot) -> list[StoredSnapshotChunks]:
    return [StoredSnapshotChunks(each, index) for index, each in enumerate(snapshots)]


def plan(*snapshots: RegionSnapshot, start: int = 0, end: int = 10**6, topic_id: str = "t") -> RegionSnapshot | None:
    return plan_recovery(stored(*snapshots), topic="d", topic_id=topic_id, log_start=start, log_end=end)


def test_the_worked_example_of_the_design_recovers_number_for_number() -> None:
    meta = RegionMeta()
    meta.term, meta.writer, meta.next_offset = 1, A, 64
    mapping = SeqOffsets(2)
    mapping.append(2, offset=16)
    mapping.append(1, offset=31)
    meta.tables[1] = TableMeta(0, mapping=mapping, latest_marked_deleted=2, current_high_watermark=32)
    assert dict(mapping) == {2: 16, 3: 16, 4: 31}

    found = collect_snapshots(enumerate(chunks(taken(meta), 1)))
    begin = plan_recovery(found, topic="d", topic_id="t", log_start=0, log_end=101)
    assert begin is not None
    assert begin.data_offset == 64
    recovered = restore_meta(begin)
    others = 1
    for offset in range(64, 101):
        if offset in (72, 81, 90):
            fold(recovered, offset, 10, write(1, A, part(1, {72: 5, 81: 6, 90: 7}[offset])))
        else:
            fold(recovered, offset, 10, write(1, A, part(2, others)))
            others += 1

    table = recovered.tables[1]
    assert table.next_seq_num == 8
    assert table.latest_marked_deleted == 2
    assert table.current_high_watermark == 91
    assert dict(table.mapping) == {2: 16, 3: 16, 4: 31, 5: 72, 6: 81, 7: 90}


@given(histories(), st.integers(70, 400), st.data())
def test_a_snapshot_at_any_offset_and_the_records_after_it_give_the_same_meta(
    history: list[Held], limit_bytes: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(history)))
    snapshot = taken(folded(history[:at]))
    found = collect_snapshots(enumerate(chunks(snapshot, 1, limit_bytes)))
    assert state_of(folded(history, restore_meta(found[0].snapshot))) == state_of(folded(history))


@given(histories(), st.data())
def test_chunks_stay_within_the_limit_and_survive_interleaving(history: list[Held], data: st.DataObject) -> None:
    one, two = taken(folded(history)), taken(folded(history[: len(history) // 2]))
    records = [(b"1", c) for c in chunks(one, 1)] + [(b"2", c) for c in chunks(two, 2)]
    assert all(len(value) <= 200 for _, value in records)
    mixed = data.draw(st.permutations(records))
    found = collect_snapshots(enumerate(value for _, value in mixed))
    assert sorted(each.snapshot.data_offset for each in found) == sorted([one.data_offset, two.data_offset])


@given(histories(), st.data())
def test_a_damaged_or_torn_snapshot_is_skipped(history: list[Held], data: st.DataObject) -> None:
    good, bad = chunks(taken(folded([])), 1), chunks(taken(folded(history)), 2)
    at = data.draw(st.integers(0, len(bad) - 1))
    if data.draw(st.booleans()):
        bad.pop(at)
    else:
        damaged = bytearray(bad[at])
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 0x40
        bad[at] = bytes(damaged)
    found = collect_snapshots(enumerate(good + bad))
    assert [(each.snapshot.data_offset, each.first_offset) for each in found] == [(0, 0)]


def test_a_newer_snapshot_version_stops_the_recovery() -> None:
    newer = Frame(FRAME.magic, FRAME.version + 1, "x").seal(b"y")
    with pytest.raises(UnknownVersion):
        collect_snapshots([(0, newer)])


def test_a_recovery_uses_the_snapshot_that_covers_most_wherever_it_is_stored() -> None:
    far = taken(folded([(9, OwnerClaim(1, A))]))
    assert plan(far, taken(folded([(3, OwnerClaim(1, A))]))) == far


def test_without_a_snapshot_the_whole_log_is_scanned() -> None:
    assert plan() is None


def test_without_a_snapshot_a_truncated_log_is_lost() -> None:
    with pytest.raises(LogLost) as lost:
        plan(start=5)
    assert (lost.value.first, lost.value.last) == (0, 4)


def test_a_log_start_past_the_snapshot_is_lost() -> None:
    with pytest.raises(LogLost) as lost:
        plan(taken(folded([(9, OwnerClaim(1, A))])), start=15)
    assert (lost.value.first, lost.value.last) == (10, 14)


def test_a_log_end_before_the_snapshot_is_lost() -> None:
    with pytest.raises(LogLost) as lost:
        plan(taken(folded([(9, OwnerClaim(1, A))])), end=4)
    assert (lost.value.first, lost.value.last) == (4, 9)


def test_a_recreated_data_topic_is_lost() -> None:
    with pytest.raises(LogLost) as lost:
        plan(taken(folded([(9, OwnerClaim(1, A))])), topic_id="another")
    assert (lost.value.first, lost.value.last) == (0, 9)


def test_entries_that_a_table_needs_and_the_log_lacks_are_lost() -> None:
    meta = folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1, 3))), (2, write(1, A, part(2, 1)))])
    with pytest.raises(LogLost) as lost:
        check_complete("d", meta, 2)
    assert (lost.value.topic, lost.value.first, lost.value.last) == ("d", 1, 1)
    fold(meta, 3, 0, MarkDeleted(1, 1, 4))
    check_complete("d", meta, 2)


def test_a_snapshot_is_a_plain_value() -> None:
    snapshot = taken(folded([(0, OwnerClaim(1, A)), (1, write(1, A, part(1, 1)))]), truncated_to=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=RegionSnapshot) == snapshot
    assert snapshot.truncated_to == 1
