"""Offsets of streams by tag: opaque texts that encode a position in the stream."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.replication_plan import TagPosition, TagRow

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, str, int, int, int, int]).decode
_VERSION = 1


def encode_offset(position: TagPosition | TagRow) -> str:
    """Return the text to resume after this position."""
    fields = (
        _VERSION,
        position.time_ms,
        position.topic,
        position.partition,
        position.offset,
        position.index,
        position.epoch,
    )
    return base64.urlsafe_b64encode(_encode(fields)).decode().rstrip("=")


def decode_offset(tag: str, text: str) -> TagPosition:
    """Undo `encode_offset`; raise `InvalidInput` for any other text."""
    try:
        fields = _decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidInput(f"{text[:60]!r} is no offset of a stream by tag: take e.tag_offset of an event") from error
    version, time_ms, topic, partition, offset, index, epoch = fields
    if version != _VERSION:
        raise InvalidInput(f"the offset has version {version}, this Tidebook knows {_VERSION}: upgrade it")
    return TagPosition(tag, time_ms, topic, partition, offset, index, epoch)


def position_before(tag: str, time_ms: int) -> TagPosition:
    """Return the position before all rows of this time: a reader at it has read everything earlier."""
    return TagPosition(tag, time_ms, "", -1, -1, -1, -1)


def start_position(tag: str, after: str | datetime | None, first_ms: int) -> tuple[TagPosition | None, int]:
    """Return what `after` means: the position after which, and the time from which, the stream starts."""
    if after is None:
        return None, first_ms
    if isinstance(after, str):
        position = decode_offset(tag, after)
        return position, position.time_ms
    if isinstance(after, datetime):
        if after.tzinfo is None:
            raise InvalidInput("a moment needs a time zone: datetime.now(UTC)")
        return None, max(first_ms, int(after.timestamp() * 1000))
    raise InvalidInput(f"after is an event's tag_offset, a datetime or None, not {type(after).__name__}")
