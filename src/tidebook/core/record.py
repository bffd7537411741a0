"""Encode and decode the records of a journal's log: an action as a msgpack array, in a frame with magic byte 0x7B.

A record of an unknown version stops its partition; a damaged record is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final

import msgspec

from tidebook.core.action import Action, Append, Damaged
from tidebook.core.bounds import STRICT_DECODE_ERRORS
from tidebook.core.errors import Corrupt, InvalidInput, TooLarge, UnknownVersion, format_int
from tidebook.core.event import check_events, pack_events
from tidebook.core.frame import HEADER_BYTES, Frame

MAGIC: Final = 0x7B
VERSION: Final = 1

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Action).decode
_frame = Frame(MAGIC, VERSION, "a journal's record")
_MAGIC_BYTE = bytes([MAGIC])
_VERSION_BYTE = bytes([VERSION])


def encode_record(action: Action, *, limit_bytes: int) -> bytes:
    """Return the bytes of the action's record.

    Raise TooLarge if they exceed the topic's limit, and InvalidInput if `decode_record` would refuse them. The body of
    an append is not checked, because `encode_events` has validated the events.
    """
    content, is_valid = b"", type(action) is not Append or not _contradicts_itself(action)
    try:
        content = _encode(action)
        _decode(content)
    except (*STRICT_DECODE_ERRORS, OverflowError, TypeError):
        is_valid = False
    if not is_valid:
        raise InvalidInput(f"the record would be unreadable (a number or id is out of bounds): {_describe(action)}")
    if len(content) + HEADER_BYTES > limit_bytes:
        raise TooLarge("the record", size_bytes=len(content) + HEADER_BYTES, limit_bytes=limit_bytes)
    return _frame.seal(content)


def _contradicts_itself(action: Append) -> bool:
    expected = action.expected
    return (expected is not None and action.at is not None) or (expected is None and action.incarnation is not None)


def _describe(action: Action) -> str:
    """Describe an action in an error message, without its body and tags."""
    fields = {name: getattr(action, name) for name in action.__struct_fields__ if name not in {"body", "tagged"}}
    texts = {name: format_int(value) if type(value) is int else repr(value) for name, value in fields.items()}
    return f"{type(action).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def encode_plain_append(epoch: int, append_id: bytes, payload_type: int, payload: bytes) -> bytes:
    """Return the record of one plain append; see `encode_plain_appends`."""
    before, between, after = _plain_template(epoch, payload_type, len(payload))
    return _frame.seal(b"".join((before, append_id, between, payload, after)))


def encode_plain_appends(
    epoch: int, append_ids: Iterable[bytes], payload_types: Sequence[int], payloads: Sequence[bytes]
) -> list[bytes]:
    """Return the records of many plain appends, each of a single event that has only a non-empty payload.

    The appends have neither `expected` nor `at`. Filling byte templates, one for each payload type and size, takes a
    third of the time of encoding each record.
    """
    types, sizes = set(payload_types), set(map(len, payloads))
    is_uniform = len(types) == len(sizes) == 1
    templates = (
        repeat(_plain_template(epoch, *types, *sizes))
        if is_uniform
        else map(_plain_template, repeat(epoch), payload_types, map(len, payloads))
    )
    join = b"".join
    filled = zip(templates, append_ids, payloads, strict=False)
    return _frame.seal_all(
        [join((before, id, between, payload, after)) for (before, between, after), id, payload in filled]
    )


#: The most bytes that the record of a plain append has in addition to its payload.
PLAIN_BYTES_MAX: Final = 128


@lru_cache(4096)
def _plain_template(epoch: int, payload_type: int, size: int) -> tuple[bytes, bytes, bytes]:
    """Return the bytes before the append id, between id and payload, and after the payload."""
    append_id, payload = b"\xff" * 16, b"\xff" * size
    whole = _encode(Append(epoch, append_id, 1, pack_events([_encode((payload_type, payload))])))
    at = whole.index(append_id)
    end = whole.rindex(b"\xff") + 1  # no byte after the payload is 0xFF
    return whole[:at], whole[at + 16 : end - size], whole[end:]


def decode_record(value: bytes) -> Action:
    """Undo `encode_record`; the events of an append stay packed.

    Raise UnknownVersion for a record of a newer version of Tidebook, and Corrupt for damaged bytes.
    """
    content = _frame.unseal(value)
    try:
        action: Action = _decode(content)  # strict: unknown fields are an error, so all versions decode alike
    except STRICT_DECODE_ERRORS as error:
        raise Corrupt(f"the record's envelope is damaged: {error}") from error
    if type(action) is Append:
        if _contradicts_itself(action):
            raise Corrupt("the append's envelope contradicts itself: both expected and at, or an incarnation alone")
        # The fold numbers events by `count`, the store writes those of the body: the two must agree.
        check_events(action.body, action.count, action.tagged)
    return action


def is_record(value: bytes | None) -> bool:
    """Return whether these bytes are a journal's record of any version, with a valid frame and checksum."""
    if value is None:
        return False
    try:
        _frame.unseal(value)
    except UnknownVersion:
        return True
    except Corrupt:
        return False
    return True


def has_other_version(value: bytes | None) -> bool:
    """Return whether a record claims a version other than the current one; `read_record` verifies its checksum."""
    return value is not None and value[:1] == _MAGIC_BYTE and value[1:2] != _VERSION_BYTE


def read_record(value: bytes | None, *, limit_bytes: int) -> Action | Damaged:
    """Decode a record for the fold; return Damaged if it is absent, damaged or over the limit.

    The result is the same in every process. Raise UnknownVersion for a record of a newer version of Tidebook.
    """
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
