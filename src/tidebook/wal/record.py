"""A record of a region's data topic: frozen layout, versioned, checked.

    frame (tidebook.core.frame) | length of the head, 4 bytes big-endian | head, msgpack | payloads, end to end

The fold needs the head alone; payloads stay where they are until somebody reads them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, chain, pairwise
from struct import unpack_from
from typing import Any, Final

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, UnknownVersion
from tidebook.core.frame import HEADER_BYTES, Frame
from tidebook.core.payload import BYTES, decode_payload, encode_payload
from tidebook.wal.names import table_id

FRAME: Final = Frame(0x7C, 1, "a write-ahead log record")
WRITER_BYTES: Final = 16
#: Where the head begins in a record's value.
_HEAD_AT: Final = HEADER_BYTES + 4
_SIZE_BYTES: Final = 4
_ALL_BYTES: Final = {bytes}
#: What can be iterated and is yet one payload, or has no order.
_ONE_PAYLOAD: Final = (bytes, bytearray, memoryview, str, Mapping, Set)
#: More than the head takes beside its parts, and more than a part takes beside its payloads' sizes.
_HEAD_BYTES_MAX: Final = 64
_PART_BYTES_MAX: Final = 48


#: Payloads by table, in order.
Writes = Iterable[tuple[int, Sequence[Any]]] | Mapping[int, Sequence[Any]]


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Payloads of one table, numbered from `first` without a gap."""

    table: int
    first: int
    #: The payloads' sizes, 4 bytes each, little-endian.
    sizes: bytes
    #: The payloads' types, a byte each; empty where all are bytes.
    kinds: bytes = b""

    @property
    def count(self) -> int:
        return len(self.sizes) >> 2


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Takes the region over. In force from here on if its term is above the one in force."""

    term: int
    writer: bytes


class Write(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Calls of `write`, many of them in one record, under the claim that they were made with."""

    term: int
    writer: bytes
    parts: tuple[Part, ...]


class Mark(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The table's entries below `seq` are no longer needed. Needs no claim: it can only tell what is so for ever."""

    table: int
    #: The offset of the record that made the table: a late mark never hits a table made again.
    life: int
    seq: int


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The table is gone; the next write of it makes a new one from 1. Needs no claim either."""

    table: int
    life: int


class Damaged(msgspec.Struct, frozen=True, gc=False):
    """A record that nobody can read: void for everybody."""

    reason: str


DataRecord = Claim | Write | Mark | Drop

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DataRecord).decode


class Payloads(msgspec.Struct, frozen=True, gc=False):
    """Checked payloads of one table on their way into a record."""

    table: int
    values: Sequence[bytes]
    #: Their types, a byte each; empty where all are bytes.
    kinds: bytes
    #: What they add to a record at most.
    size_bytes: int


def pack_payloads(table: int, payloads: Sequence[object]) -> Payloads:
    """Check payloads and take their size; all of them bytes is the case to be quick about."""
    if type(payloads) is not list and not _is_row(payloads):
        raise InvalidInput("payloads is a list of payloads, not one: put it in brackets")
    values: tuple[Any, ...] = tuple(payloads)
    if len(values) == 1 and type(values[0]) is bytes:
        return Payloads(table, values, b"", len(values[0]) + _SIZE_BYTES + _PART_BYTES_MAX)
    if set(map(type, values)) == _ALL_BYTES:
        return Payloads(table, values, b"", sum(map(len, values)) + _SIZE_BYTES * len(values) + _PART_BYTES_MAX)
    pairs = [encode_payload(payload) for payload in values]
    if not pairs:
        raise InvalidInput("payloads is empty: a write holds at least one")
    values = tuple([data for _, data in pairs])
    kinds = bytes([kind for kind, _ in pairs])
    size_bytes = sum(map(len, values)) + (_SIZE_BYTES + 1) * len(values) + _PART_BYTES_MAX
    return Payloads(table, values, kinds, size_bytes)


def pack_writes(writes: Writes) -> list[Payloads]:
    """Check the payloads of several tables."""
    if not isinstance(writes, Mapping) and not _is_row(writes):
        raise InvalidInput(f"writes are pairs of table and payloads, or a mapping, not {type(writes).__name__}")
    packed = []
    for pair in writes.items() if isinstance(writes, Mapping) else writes:
        if not _is_row(pair) or len(tuple(pair)) != 2:
            raise InvalidInput(f"each of writes is a pair of table and payloads, not {type(pair).__name__}")
        table, payloads = pair
        packed.append(pack_payloads(table_id(table), payloads))
    if not packed:
        raise InvalidInput("writes is empty: give at least one pair of table and payloads")
    return packed


def _is_row(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, _ONE_PAYLOAD)


def record_bytes_max(payloads_bytes: int) -> int:
    """The size that a record does not exceed whose payloads add so much."""
    return _HEAD_AT + _HEAD_BYTES_MAX + payloads_bytes


def encode_write(term: int, writer: bytes, parts: Sequence[tuple[int, Payloads]]) -> tuple[Write, bytes]:
    """A record of numbered payloads, and its bytes."""
    write = Write(
        term, writer, tuple([Part(each.table, first, _packed(each.values), each.kinds) for first, each in parts])
    )
    return write, _seal(write, chain.from_iterable([each.values for _, each in parts]))


def encode_control(record: Claim | Mark | Drop) -> bytes:
    """The bytes of a record without payloads."""
    return _seal(record, ())


def decode_record(value: bytes) -> DataRecord:
    """The head of a record. Raises UnknownVersion for what a newer Tidebook wrote, and Corrupt for damage."""
    rest = FRAME.unseal(value)
    body_at = 4 + int.from_bytes(rest[:4], "big")
    try:
        record: DataRecord = _decode(rest[4:body_at])
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the head of a write-ahead log record is damaged: {error}") from error
    if isinstance(record, Write):
        _check_parts(record, len(rest) - body_at)
        _check_claim(record)
    elif isinstance(record, Claim):
        _check_claim(record)
    return record


def read_record(value: bytes | None) -> DataRecord | Damaged:
    """What a record says to whoever folds it: damage is void, the same for all."""
    if value is None:
        return Damaged("the record has no value")
    try:
        return decode_record(value)
    except UnknownVersion:
        raise
    except Corrupt as error:
        return Damaged(str(error))


def payloads_of(write: Write, value: bytes) -> Iterator[tuple[Part, Sequence[Any]]]:
    """The parts of a record with their payloads, as what went in."""
    at = _HEAD_AT + int.from_bytes(value[HEADER_BYTES:_HEAD_AT], "big")
    for part in write.parts:
        sizes = _unpacked(part.sizes)
        payloads: Sequence[Any]
        if sizes.count(sizes[0]) == len(sizes):  # cut in one step, far quicker than one by one
            payloads = unpack_from(f"{sizes[0]}s" * len(sizes), value, at)
            at += sizes[0] * len(sizes)
        else:
            ends = list(accumulate(sizes, initial=at))
            payloads = [value[begin:end] for begin, end in pairwise(ends)]
            at = ends[-1]
        if part.kinds:
            payloads = [
                data if kind == BYTES else decode_payload(kind, data)
                for kind, data in zip(part.kinds, payloads, strict=True)
            ]
        yield part, payloads


def _seal(record: DataRecord, body: Any) -> bytes:
    head = _encode(record)
    return FRAME.seal(b"".join((len(head).to_bytes(4, "big"), head, *body)))


def _check_claim(record: Write | Claim) -> None:
    if len(record.writer) != WRITER_BYTES or record.term < 1:
        raise Corrupt("a write-ahead log record carries no claim that could be in force")


def _check_parts(write: Write, body_bytes: int) -> None:
    held = 0
    for part in write.parts:
        if part.first < 1 or not part.sizes or len(part.sizes) % _SIZE_BYTES:
            raise Corrupt("a part of a write-ahead log record contradicts itself")
        if part.kinds and len(part.kinds) != part.count:
            raise Corrupt("a part of a write-ahead log record has other types than payloads")
        held += sum(_unpacked(part.sizes))
    if not write.parts or held != body_bytes:
        raise Corrupt("a write-ahead log record has other payloads than its head says")


def _packed(values: Sequence[bytes]) -> bytes:
    if len(values) == 1:
        return len(values[0]).to_bytes(_SIZE_BYTES, "little")
    packed = array("I", map(len, values))
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(sizes: bytes) -> array[int]:
    unpacked = array("I", sizes)
    if sys.byteorder != "little":
        unpacked.byteswap()
    return unpacked
