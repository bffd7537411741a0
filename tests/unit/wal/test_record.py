"""The encoding of the records of the data topic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.wal.fold_model import A
from tidebook.core.errors import Corrupt, InvalidInput, UnknownVersion
from tidebook.core.frame import Frame
from tidebook.wal.record import (
    FRAME,
    DamagedWalRecord,
    DropTable,
    MarkDeleted,
    OwnerClaim,
    Write,
    decode_record,
    encode_control,
    encode_write,
    pack_payloads,
    payloads_of,
    read_record,
    record_bytes_max,
)

PAYLOADS = st.lists(
    st.binary(max_size=20) | st.text(max_size=5) | st.dictionaries(st.text(max_size=3), st.integers(0, 9)),
    min_size=1,
    max_size=5,
)


@given(st.lists(st.tuples(st.integers(0, 2**53 - 1), st.integers(1, 2**60), PAYLOADS), min_size=1, max_size=4))
def test_payloads_are_decoded_as_they_were_encoded(parts: list[tuple[int, int, list[Any]]]) -> None:
    packed = [(first, pack_payloads(table, payloads)) for table, first, payloads in parts]
    _, value = encode_write(3, A, packed)
    record = decode_record(value)
    assert isinstance(record, Write)
    assert (record.term, record.writer) == (3, A)
    got = [(p.table, p.first, list(payloads)) for p, payloads in payloads_of(record, value)]
    assert got == [(table, first, payloads) for table, first, payloads in parts]


@given(st.lists(st.tuples(st.integers(0, 2**53 - 1), st.integers(1, 2**60), PAYLOADS), min_size=1, max_size=4))
def test_a_record_is_never_larger_than_its_estimate(parts: list[tuple[int, int, list[Any]]]) -> None:
    packed = [(first, pack_payloads(table, payloads)) for table, first, payloads in parts]
    assert len(encode_write(2**60, A, packed)[1]) <= record_bytes_max(sum(each.size_bytes for _, each in packed))


@pytest.mark.parametrize("record", [OwnerClaim(4, A), MarkDeleted(1, 0, 9), DropTable(2, 77)])
def test_control_records_are_decoded_as_they_were_encoded(record: OwnerClaim | MarkDeleted | DropTable) -> None:
    assert decode_record(encode_control(record)) == record


@given(st.data())
def test_a_flipped_bit_is_damage_and_never_another_record(data: st.DataObject) -> None:
    _, value = encode_write(1, A, [(1, pack_payloads(1, [b"abc", b"de"]))])
    at = data.draw(st.integers(0, len(value) - 1))
    damaged = bytearray(value)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    assert isinstance(read_record(bytes(damaged)), DamagedWalRecord)


@given(st.integers(0, 60))
def test_a_torn_record_is_damage(length: int) -> None:
    _, value = encode_write(1, A, [(1, pack_payloads(1, [b"abc" * 20]))])
    assert isinstance(read_record(value[:length]), DamagedWalRecord)


def test_a_record_without_a_value_is_damage() -> None:
    assert isinstance(read_record(None), DamagedWalRecord)


def test_a_newer_version_stops_the_reader() -> None:
    newer = Frame(FRAME.magic, FRAME.version + 1, "x").seal(b"whatever")
    with pytest.raises(UnknownVersion, match="upgrade"):
        read_record(newer)


def test_a_head_that_contradicts_its_body_is_damage() -> None:
    _, value = encode_write(1, A, [(1, pack_payloads(1, [b"abc"]))])
    more = FRAME.seal(bytes(FRAME.unseal(value)) + b"x")
    with pytest.raises(Corrupt, match="do not have the sizes that its head lists"):
        decode_record(more)


def test_a_single_payload_instead_of_a_list_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="in brackets"):
        pack_payloads(1, b"abc")


def test_an_empty_write_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        pack_payloads(1, [])
