"""Chunks: records of one partition that were appended together are kept, and read, as one row."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from tidebook.core.errors import Corrupt

#: A chunk ends where its values have reached this size.
CHUNK_BYTES_MAX: Final = 128_000
_OFFSET_BITS = 40


def base(partition_id: int) -> int:
    """The place of a partition's offset 0. Its offsets lie behind it, those of the next partition behind them all."""
    return partition_id << _OFFSET_BITS


class Bounds(NamedTuple):
    """A partition as it is at one moment."""

    id: int
    start: int
    end: int
    indexed_to: int
    #: The chunks that no row of the directory has yet.
    recent: bytes


class Moved(Exception):
    """What the bounds promised is no longer there: read them again."""


class Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record within a chunk; its offset follows from its place, its time is the chunk's."""

    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class _PackedKey(msgspec.Struct, array_like=True, frozen=True, gc=False):
    key: bytes | None


pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Packed]).decode
_unpack_keys = msgspec.msgpack.Decoder(list[_PackedKey]).decode


def unpack(body: bytes) -> list[Packed]:
    """The records of a chunk."""
    try:
        return _unpack(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"a chunk of the log is damaged ({error}): restore a copy of log.db") from error


def unpack_keys(body: bytes) -> list[bytes | None]:
    """The keys of a chunk, the rest passed over."""
    try:
        return [each.key for each in _unpack_keys(body)]
    except msgspec.MsgspecError as error:
        raise Corrupt(f"a chunk of the log is damaged ({error}): restore a copy of log.db") from error
