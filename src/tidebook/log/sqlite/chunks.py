"""Chunks: the records of a partition that were appended together are stored and read as one row."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from tidebook.core.errors import Corrupt

#: A chunk is complete once the size of its values reaches this.
CHUNK_BYTES_MAX: Final = 128_000
_OFFSET_BITS = 40


def partition_base(partition_id: int) -> int:
    """Return the row key of a partition's offset 0, to which offsets are added. Partitions have disjoint key ranges."""
    return partition_id << _OFFSET_BITS


class PartitionBounds(NamedTuple):
    """The row of a partition, as read at one moment."""

    id: int
    start: int
    end: int
    indexed_to: int
    #: The encoded `Listing` of the chunks that are not in the directory yet.
    recent: bytes


class BoundsChanged(Exception):
    """Rows that the bounds refer to were truncated or merged since: read the bounds again."""


class Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record within a chunk: its offset follows from its index, and its timestamp is the chunk's."""

    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class _PackedKey(msgspec.Struct, array_like=True, frozen=True, gc=False):
    key: bytes | None


pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Packed]).decode
_unpack_keys = msgspec.msgpack.Decoder(list[_PackedKey]).decode


def unpack(body: bytes) -> list[Packed]:
    """Return the records of a chunk; raise Corrupt if it is damaged."""
    try:
        return _unpack(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"a chunk of the log is damaged ({error}): restore a copy of log.db") from error


def unpack_keys(body: bytes) -> list[bytes | None]:
    """Return the keys of a chunk's records without decoding the rest; raise Corrupt if it is damaged."""
    try:
        return [each.key for each in _unpack_keys(body)]
    except msgspec.MsgspecError as error:
        raise Corrupt(f"a chunk of the log is damaged ({error}): restore a copy of log.db") from error
