"""Where a stream by tag is resumed: an opaque text that orders like the stream, or a moment."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.replication import TagPlace, TagRow

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, str, int, int, int, int]).decode
_VERSION = 1


def encode_offset(place: TagPlace | TagRow) -> str:
    """A text to resume behind this place."""
    fields = (_VERSION, place.time_ms, place.topic, place.partition, place.offset, place.index, place.epoch)
    return base64.urlsafe_b64encode(_encode(fields)).decode().rstrip("=")


def decode_offset(tag: str, text: str) -> TagPlace:
    """Undo `encode_offset`."""
    try:
        fields = _decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidInput(f"{text[:60]!r} is no offset of a stream by tag: take e.tag_offset of an event") from error
    version, time_ms, topic, partition, offset, index, epoch = fields
    if version != _VERSION:
        raise InvalidInput(f"the offset has version {version}, this Tidebook knows {_VERSION}: upgrade it")
    return TagPlace(tag, time_ms, topic, partition, offset, index, epoch)


def read_through(tag: str, time_ms: int) -> TagPlace:
    """The place before all that has this time: whoever is here has read everything before it."""
    return TagPlace(tag, time_ms, "", -1, -1, -1, -1)


def beginning(tag: str, after: str | datetime | None, first_ms: int) -> tuple[TagPlace | None, int]:
    """What `after` means: the place behind which, and the time from which, the stream begins."""
    if after is None:
        return None, first_ms
    if isinstance(after, str):
        place = decode_offset(tag, after)
        return place, place.time_ms
    if isinstance(after, datetime):
        if after.tzinfo is None:
            raise InvalidInput("a moment needs a time zone: datetime.now(UTC)")
        return None, max(first_ms, int(after.timestamp() * 1000))
    raise InvalidInput(f"after is an event's tag_offset, a datetime or None, not {type(after).__name__}")
