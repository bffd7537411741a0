"""Encode and decode the records of a region's data topic.

    frame (tidebook.core.frame) | length of the head, 4 bytes big-endian | head, msgpack | payloads, concatenated

The fold decodes only the head; payloads are sliced out when an entry is read. The layout of a version never changes and
every field is bounded, so all readers agree whether a record is damaged.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, chain, pairwise
from struct import unpack_from
from typing import Any, Final

import msgspec

from tidebook.core.bounds import STRICT_DECODE_ERRORS, Counter, Identity, Number, PositiveCounter
from tidebook.core.errors import Corrupt, InvalidInput, UnknownVersion
from tidebook.core.frame import HEADER_BYTES, Frame
from tidebook.core.payload import BYTES, decode_payload, encode_payload

#: The largest id of a region or a table: the largest integer that every JSON parser represents exactly.
ID_MAX: Final = 2**53 - 1
FRAME: Final = Frame(0x7C, 1, "a write-ahead log record")
#: The position of the head in a record's value.
_HEAD_AT: Final = HEADER_BYTES + 4
_SIZE_BYTES: Final = 4
_ALL_BYTES: Final = {bytes}
#: Iterable types that are not lists of payloads: single payloads, and types without an order.
_ONE_PAYLOAD: Final = (bytes, bytearray, memoryview, str, Mapping, Set)
#: Upper bounds of the encoded size: of a head without its parts, and of a part without its payload sizes.
_HEAD_BYTES_MAX: Final = 64
_PART_BYTES_MAX: Final = 48

#: Payloads by table, in the order in which they are written.
Writes = Iterable[tuple[int, Sequence[Any]]] | Mapping[int, Sequence[Any]]


class WalEntry(msgspec.Struct, frozen=True, gc=False):
    """One payload of a table, with its sequence number and the offset of its record."""

    table: int
    seq: int
    payload: Any
    offset: int


class Written(msgspec.Struct, frozen=True, gc=False):
    """The result of a write: the first and last sequence number, and the offset of the record."""

    first: int
    last: int
    offset: int


class TableWrites(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Payloads of one table, numbered from `first` without gaps."""

    table: Number
    first: PositiveCounter
    #: The size of each payload, 4 bytes little-endian.
    sizes: bytes
    #: The type of each payload, one byte; empty if all payloads are bytes.
    kinds: bytes = b""

    @property
    def count(self) -> int:
        """The number of payloads."""
        return len(self.sizes) >> 2


class OwnerClaim(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False, forbid_unknown_fields=True):
    """Claim the region for a writer. It takes effect if its term is above that of the claim in force."""

    term: PositiveCounter
    writer: Identity


class Write(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False, forbid_unknown_fields=True):
    """The payloads of one or more writes. It is valid only under the claim with this term and writer."""

    term: PositiveCounter
    writer: Identity
    parts: tuple[TableWrites, ...]


class MarkDeleted(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False, forbid_unknown_fields=True):
    """Mark a table's entries below `seq` as no longer needed. This needs no claim, because marks only advance."""

    table: Number
    #: The offset of the record that created the table, so that a late mark never applies to a table created again.
    incarnation: Counter
    seq: Counter


class DropTable(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False, forbid_unknown_fields=True):
    """Drop this incarnation of a table; the next write creates a new one from sequence number 1. No claim is needed."""

    table: Number
    incarnation: Counter


class FlushRequest(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False, forbid_unknown_fields=True):
    """Ask the owner to flush this incarnation of a table up to `seq`. This needs no claim and removes nothing."""

    table: Number
    incarnation: Counter
    seq: Counter


class DamagedWalRecord(msgspec.Struct, frozen=True, gc=False):
    """A record that cannot be decoded. Every fold ignores it in the same way."""

    reason: str


#: Records that need no claim.
Control = MarkDeleted | DropTable | FlushRequest
DataRecord = OwnerClaim | Write | Control

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DataRecord).decode


class Payloads(msgspec.Struct, frozen=True, gc=False):
    """Validated and encoded payloads of one table."""

    table: int
    values: Sequence[bytes]
    #: The type of each payload, one byte; empty if all payloads are bytes.
    kinds: bytes
    #: An upper bound of the bytes that they add to a record.
    size_bytes: int


def whole_number(value: object, name: str) -> int:
    """Return an integer from 0 to `ID_MAX`, else raise `InvalidInput`; `name` names the argument."""
    if type(value) is not int:
        raise InvalidInput(f"{name} must be a whole number, not {type(value).__name__}")
    if not 0 <= value <= ID_MAX:
        raise InvalidInput(f"{name} must be from 0 to {ID_MAX}, not {value}")
    return value


def table_id(value: object) -> int:
    """Return a valid table id, else raise `InvalidInput`."""
    return whole_number(value, "a table's id")


def pack_payloads(table: int, payloads: Sequence[Any]) -> Payloads:
    """Validate, encode and measure payloads; raise `InvalidInput` if they are not a list, empty or not encodable."""
    if type(payloads) is not list and not _is_ordered(payloads):
        raise InvalidInput("payloads must be a list: put a single payload in brackets")
    values, kinds = tuple(payloads), b""
    if len(values) == 1 and type(values[0]) is bytes:  # the most frequent write
        return Payloads(table, values, kinds, len(values[0]) + _SIZE_BYTES + _PART_BYTES_MAX)
    if set(map(type, values)) != _ALL_BYTES:
        pairs = [encode_payload(payload) for payload in values]
        if not pairs:
            raise InvalidInput("payloads is empty: a write needs at least one")
        values, kinds = tuple([data for _, data in pairs]), bytes([kind for kind, _ in pairs])
    size_bytes = sum(map(len, values)) + _SIZE_BYTES * len(values) + len(kinds) + _PART_BYTES_MAX
    return Payloads(table, values, kinds, size_bytes)


def pack_writes(writes: Writes) -> list[Payloads]:
    """Validate and encode the payloads of several tables; raise `InvalidInput` as `pack_payloads` does."""
    if not isinstance(writes, Mapping) and not _is_ordered(writes):
        raise InvalidInput(f"writes must be pairs of table and payloads, or a mapping, not {type(writes).__name__}")
    packed = []
    for pair in writes.items() if isinstance(writes, Mapping) else writes:
        if not _is_ordered(pair) or len(tuple(pair)) != 2:
            raise InvalidInput(f"each item of writes must be a pair of table and payloads, not {type(pair).__name__}")
        table, payloads = pair
        packed.append(pack_payloads(table_id(table), payloads))
    if not packed:
        raise InvalidInput("writes is empty: give at least one pair of table and payloads")
    return packed


def _is_ordered(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, _ONE_PAYLOAD)


def record_bytes_max(payloads_bytes: int) -> int:
    """Return the upper bound of a record's size, given the sum of `Payloads.size_bytes`."""
    return _HEAD_AT + _HEAD_BYTES_MAX + payloads_bytes


def encode_write(term: int, writer: bytes, parts: Sequence[tuple[int, Payloads]]) -> tuple[Write, bytes]:
    """Return a write record of (first sequence number, payloads) parts, and its encoded bytes."""
    write = Write(
        term,
        writer,
        tuple([TableWrites(each.table, first, _pack_sizes(each.values), each.kinds) for first, each in parts]),
    )
    return write, _seal(write, chain.from_iterable([each.values for _, each in parts]))


def encode_control(record: OwnerClaim | Control) -> bytes:
    """Encode a record without payloads; raise `InvalidInput` for values that `decode_record` would reject."""
    try:
        _decode(_encode(record))
    except (*STRICT_DECODE_ERRORS, OverflowError) as error:
        raise InvalidInput(f"a write-ahead log record with these values could not be read back: {error}") from error
    return _seal(record, ())


def decode_record(value: bytes) -> DataRecord:
    """Decode the head of a record; raise `UnknownVersion` if a newer version wrote it, `Corrupt` if it is damaged."""
    rest = FRAME.unseal(value)
    body_at = 4 + int.from_bytes(rest[:4], "big")
    try:
        record: DataRecord = _decode(rest[4:body_at])
    except STRICT_DECODE_ERRORS as error:
        raise Corrupt(f"the head of a write-ahead log record is damaged: {error}") from error
    if isinstance(record, Write):
        _check_parts(record, len(rest) - body_at)
    elif len(rest) > body_at:
        raise Corrupt("a write-ahead log record has payloads that its head does not list")
    return record


def read_record(value: bytes | None) -> DataRecord | DamagedWalRecord:
    """Decode a record for the fold: return damage as a value, so that every process ignores the same records."""
    if value is None:
        return DamagedWalRecord("the record has no value")
    try:
        return decode_record(value)
    except UnknownVersion:
        raise
    except Corrupt as error:
        return DamagedWalRecord(str(error))


def payloads_of(write: Write, value: bytes) -> Iterator[tuple[TableWrites, Sequence[Any]]]:
    """Yield each part of a record with its decoded payloads."""
    at = _HEAD_AT + int.from_bytes(value[HEADER_BYTES:_HEAD_AT], "big")
    for part in write.parts:
        sizes = array_from_bytes("I", part.sizes)
        payloads: Sequence[Any]
        if sizes.count(sizes[0]) == len(sizes):  # equal sizes: one struct call is much faster than slicing
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


def _check_parts(write: Write, body_bytes: int) -> None:
    total_bytes = 0
    for part in write.parts:
        if not part.sizes or len(part.sizes) % _SIZE_BYTES:
            raise Corrupt("the payload sizes of a part of a write-ahead log record are damaged")
        if part.kinds and (len(part.kinds) != part.count or max(part.kinds) > BYTES):
            raise Corrupt("a part of a write-ahead log record has a different number of types and payloads")
        total_bytes += sum(array_from_bytes("I", part.sizes))
    if not write.parts or total_bytes != body_bytes:
        raise Corrupt("the payloads of a write-ahead log record do not have the sizes that its head lists")


def _pack_sizes(values: Sequence[bytes]) -> bytes:
    if len(values) == 1:
        return len(values[0]).to_bytes(_SIZE_BYTES, "little")
    return array_to_bytes(array("I", map(len, values)))


def array_to_bytes(values: array[int]) -> bytes:
    """Return the values as little-endian bytes; on a big-endian machine this changes the array itself."""
    if sys.byteorder != "little":
        values.byteswap()
    return values.tobytes()


def array_from_bytes(code: str, data: bytes) -> array[int]:
    """Return the array of this type code that `array_to_bytes` has converted to these bytes."""
    values = array(code, data)
    if sys.byteorder != "little":
        values.byteswap()
    return values
