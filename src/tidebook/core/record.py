"""The envelope of a log record, versioned and checked: a frame (tidebook.core.frame) of magic 0x7B, a msgpack array.

Unknown versions stop a partition; damage does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final

import msgspec

from tidebook.core.action import Action, Append, Damaged
from tidebook.core.errors import Corrupt, TooLarge, UnknownVersion
from tidebook.core.event import count_events, pack_events
from tidebook.core.frame import HEADER_BYTES, Frame

MAGIC: Final = 0x7B
VERSION: Final = 1

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Action).decode
_frame = Frame(MAGIC, VERSION, "the record")
_MAGIC_BYTE = bytes([MAGIC])
_VERSION_BYTE = bytes([VERSION])


def encode_record(action: Action, *, limit_bytes: int) -> bytes:
    """The bytes of a record, refused where they are over the topic's limit."""
    rest = _encode(action)
    if len(rest) + HEADER_BYTES > limit_bytes:
        raise TooLarge("the record", size_bytes=len(rest) + HEADER_BYTES, limit_bytes=limit_bytes)
    return _frame.seal(rest)


def encode_plain_appends(
    epoch: int, append_ids: Iterable[bytes], payload_types: Sequence[int], payloads: Sequence[bytes]
) -> list[bytes]:
    """`encode_record` of appends of one event each that is a payload, not empty, and nothing else, numbered next.

    Poured into moulds of their sizes, which the encoder made: a third of the time, where thousands go in one call.
    """
    types, sizes = set(payload_types), set(map(len, payloads))
    alike = len(types) == len(sizes) == 1
    moulds = (
        repeat(_mould(epoch, *types, *sizes))
        if alike
        else map(_mould, repeat(epoch), payload_types, map(len, payloads))
    )
    join = b"".join
    poured = zip(moulds, append_ids, payloads, strict=False)
    return _frame.seal_all(
        [join((before, id, between, payload, behind)) for (before, between, behind), id, payload in poured]
    )


#: A plain append takes so many bytes more than its payload, at most.
PLAIN_BYTES_MAX: Final = 128


@lru_cache(4096)
def _mould(epoch: int, payload_type: int, size: int) -> tuple[bytes, bytes, bytes]:
    """What stands before the id, between id and payload, and behind the payload."""
    append_id, payload = b"\xff" * 16, b"\xff" * size
    whole = _encode(Append(epoch, append_id, 1, pack_events([_encode((payload_type, payload))])))
    at = whole.index(append_id)
    end = whole.rindex(b"\xff") + 1  # nothing behind the payload has such a byte
    return whole[:at], whole[at + 16 : end - size], whole[end:]


def decode_record(value: bytes) -> Action:
    """Undo `encode_record`; the events of an append stay packed.

    Raises UnknownVersion for what a newer Tidebook wrote, and Corrupt for damage.
    """
    rest = _frame.unseal(value)
    try:
        action: Action = _decode(rest)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the record's envelope is damaged: {error}") from error
    if isinstance(action, Append):
        _check_append(action)
    return action


def _check_append(action: Append) -> None:
    """Whoever numbers the events goes by `count`, whoever keeps them by the body: both must say the same."""
    if action.count < 1 or (action.expected is not None and action.at is not None):
        raise Corrupt("the append's envelope contradicts itself")
    events = count_events(action.body)
    if events != action.count:
        raise Corrupt(f"the append speaks of {action.count} events and holds {events}")


def has_other_version(value: bytes | None) -> bool:
    """Whether a record says that it is of a version that is not ours; whether that is true, `read_record` finds out."""
    return value is not None and value[:1] == _MAGIC_BYTE and value[1:2] != _VERSION_BYTE


def read_record(value: bytes | None, *, limit_bytes: int) -> Action | Damaged:
    """What a record says to whoever folds it: damage and over-size are void, the same for all."""
    if value is None:
        return Damaged("the record has no value")
    if len(value) > limit_bytes:
        return Damaged(f"the record takes {len(value):,} bytes and the topic's limit is {limit_bytes:,}")
    try:
        return decode_record(value)
    except UnknownVersion:
        raise
    except Corrupt as error:
        return Damaged(str(error))
