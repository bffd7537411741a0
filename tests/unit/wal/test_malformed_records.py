"""Records and snapshots with valid frames and arbitrary contents are either ignored or foldable."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.core.nonsense import DEEP, wrong
from tests.unit.wal.fold_model import A
from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.wal.meta import RegionMeta, TableMeta, Verdict, fold
from tidebook.wal.record import (
    FRAME,
    DamagedWalRecord,
    DataRecord,
    DropTable,
    MarkDeleted,
    OwnerClaim,
    Write,
    encode_control,
    payloads_of,
)
from tidebook.wal.record import read_record as read
from tidebook.wal.snapshot import FRAME as SNAPSHOT_FRAME
from tidebook.wal.snapshot import collect_snapshots, restore_meta, take_snapshot

HUGE = 2**64 - 1
ONE = (1).to_bytes(4, "little")


def framed(head: Any, body: bytes = b"") -> bytes:
    packed = msgspec.msgpack.encode(head)
    return FRAME.seal(len(packed).to_bytes(4, "big") + packed + body)


def snapshot_of(fields: Any) -> bytes:
    """Return a snapshot of one chunk with valid checksums and arbitrary contents."""
    data = msgspec.msgpack.encode(fields)
    return SNAPSHOT_FRAME.seal(msgspec.msgpack.encode([bytes(16), 0, 1, crc32(data), data]))


NONSENSE = {
    "a field that nobody knows": ([1, 1, A, None], b""),
    "a deep field that nobody knows": ([1, 1, A, DEEP], b""),
    "a term of 0": ([1, 0, A], b""),
    "a term past 2**63": ([1, HUGE, A], b""),
    "a short writer": ([1, 1, A[:3]], b""),
    "a table past 2**63": ([4, HUGE, 0], b""),
    "a table below 0": ([4, -1, 0], b""),
    "an incarnation past 2**63": ([4, 1, HUGE], b""),
    "a mark past 2**63": ([3, 1, 0, HUGE], b""),
    "a mark below 0": ([3, 1, 0, -1], b""),
    "a claim with payloads": ([1, 1, A], b"a"),
    "no part": ([2, 1, A, []], b""),
    "a deep part": ([2, 1, A, [[1, 1, ONE, b"", DEEP]]], b"a"),
    "a first number of 0": ([2, 1, A, [[1, 0, ONE]]], b"a"),
    "a first number past 2**63": ([2, 1, A, [[1, HUGE, ONE]]], b"a"),
    "a payload of an unknown type": ([2, 1, A, [[1, 1, ONE, b"\x03"]]], b"a"),
    "other types than payloads": ([2, 1, A, [[1, 1, ONE, b"\x02\x02"]]], b"a"),
    "sizes cut short": ([2, 1, A, [[1, 1, ONE[:3]]]], b"a"),
    "other payloads than sizes": ([2, 1, A, [[1, 1, ONE]]], b"ab"),
}


@pytest.mark.parametrize(("head", "body"), NONSENSE.values(), ids=NONSENSE)
def test_a_well_framed_malformed_record_is_ignored_by_every_fold(head: Any, body: bytes) -> None:
    assert isinstance(read(framed(head, body)), DamagedWalRecord)


@pytest.mark.parametrize(
    "record",
    [
        OwnerClaim(0, A),
        OwnerClaim(2**62, A),
        OwnerClaim(2**64, A),
        MarkDeleted(1, 0, -1),
        MarkDeleted(-1, 0, 1),
        DropTable(2**53, 0),
    ],
    ids=repr,
)
def test_a_record_that_could_not_be_decoded_is_rejected_before_it_is_written(
    record: OwnerClaim | MarkDeleted | DropTable,
) -> None:
    with pytest.raises(InvalidInput):
        encode_control(record)


heads = st.one_of(
    st.tuples(st.just(1), st.integers(1, 3), st.just(A)).map(list),
    st.tuples(st.just(2), st.integers(1, 3), st.just(A), st.lists(st.just([1, 1, ONE, b"\x00"]), max_size=2)).map(list),
    st.tuples(st.just(3), st.integers(0, 1), st.integers(0, 2), st.integers(0, 3)).map(list),
    st.tuples(st.just(4), st.integers(0, 1), st.integers(0, 2)).map(list),
)


def _changed(draw: st.DrawFn, fields: list[Any]) -> Any:
    """Return the same structure with one value changed, at any depth."""
    if not fields or draw(st.integers(0, 4)) == 0:
        return [*fields, draw(wrong)]
    at = draw(st.integers(0, len(fields) - 1))
    if isinstance(fields[at], list) and draw(st.booleans()):
        return [*fields[:at], _changed(draw, fields[at]), *fields[at + 1 :]]
    return [*fields[:at], draw(wrong), *fields[at + 1 :]]


@st.composite
def data_records(draw: st.DrawFn) -> bytes:
    head: Any = draw(heads)
    if draw(st.booleans()):
        head = _changed(draw, head)
    return framed(head, draw(st.sampled_from([b"", b"1", b"11", b"abc"])))


@settings(deadline=None)
@given(st.lists(data_records() | st.binary(max_size=30).map(FRAME.seal), max_size=8))
def test_every_decodable_record_can_be_folded_snapshotted_and_read(values: list[bytes]) -> None:
    meta = RegionMeta()
    records: list[DataRecord | DamagedWalRecord] = [read(value) for value in values]
    for offset, (value, record) in enumerate(zip(values, records, strict=True)):
        assert isinstance(fold(meta, offset, len(value), record), Verdict)
        if isinstance(record, Write):
            with suppress(Corrupt):  # a payload may be malformed in a way that only its decoder detects
                assert sum(len(payloads) for _, payloads in payloads_of(record, value)) > 0
    snapshot = take_snapshot(meta, topic_id="t", truncated_to=0, taken_ms=1)
    [stored] = collect_snapshots([(0, snapshot_of(snapshot))])
    assert stored.snapshot == snapshot


def a_snapshot() -> list[Any]:
    """Return the fields of a valid snapshot."""
    meta = RegionMeta()
    meta.term, meta.writer = 1, A
    for offset in range(3):
        meta.tables.setdefault(1, TableMeta(0)).mapping.append(2, offset=offset)
        meta.byte_index.add(offset, 2_000)
    meta.next_offset = 3
    fields: list[Any] = msgspec.msgpack.decode(
        msgspec.msgpack.encode(take_snapshot(meta, topic_id="t", truncated_to=0, taken_ms=1))
    )
    return fields


def packed_numbers(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


SNAPSHOTS = {
    "a field that nobody knows": lambda s: s.append(None),
    "a deep field that nobody knows": lambda s: s.append(DEEP),
    "an offset past 2**63": lambda s: s.__setitem__(1, HUGE),
    "a time past the last year": lambda s: s.__setitem__(3, HUGE),
    "a short writer": lambda s: s.__setitem__(5, b""),
    "a claim that was made after the snapshot": lambda s: s.__setitem__(6, 3),
    "a byte index past 2**63": lambda s: s[7].__setitem__(2, [HUGE, HUGE]),
    "different numbers of offsets and totals in the byte index": lambda s: s[7][2].append(9),
    "a byte index without steps": lambda s: s[7].__setitem__(1, 0),
    "a table that was made after the snapshot": lambda s: s[8][0].__setitem__(1, 3),
    "a mapping out of order": lambda s: s[8][0][4].__setitem__(2, packed_numbers(1, 5, 3)),
    "offsets out of order": lambda s: s[8][0][4].__setitem__(3, packed_numbers(2, 1, 0)),
    "a mapping that begins at 0": lambda s: s[8][0][4].__setitem__(2, packed_numbers(0, 3, 5)),
}


@pytest.mark.parametrize("change", SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_a_malformed_snapshot_is_skipped(change: Any) -> None:
    fields = a_snapshot()
    assert len(collect_snapshots([(0, snapshot_of(fields))])) == 1
    change(fields)
    assert collect_snapshots([(0, snapshot_of(fields))]) == []


@settings(deadline=None)
@given(st.data())
def test_every_snapshot_is_skipped_or_can_be_restored(data: st.DataObject) -> None:
    changed = data.draw(st.composite(lambda draw: _changed(draw, a_snapshot()))())
    chunk = data.draw(st.sampled_from([snapshot_of(changed), SNAPSHOT_FRAME.seal(msgspec.msgpack.encode(changed))]))
    for stored in collect_snapshots([(0, chunk)]):
        meta = restore_meta(stored.snapshot)
        for table in meta.tables.values():
            assert len(list(table.mapping.batches())) == table.mapping.batch_count
        assert meta.held_bytes is not None
