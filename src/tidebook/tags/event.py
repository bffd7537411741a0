"""An event as streams by tag deliver it, its offset in the stream, and the arguments of streams."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic
from uuid import UUID

import msgspec
from msgspec import UNSET

from tidebook.core.errors import InvalidInput
from tidebook.core.event import decode_event, event_tags, event_type_of, read_payload
from tidebook.core.key import topic_name
from tidebook.core.payload import JSON, decode_payload, encode_text
from tidebook.core.replication_plan import TagPosition, TagRow

#: Steps of 100 ns from the Gregorian reform, where TimeUUIDs begin, to 1970.
_GREGORIAN_TICKS = 0x01B2_1DD2_1381_4000
_OFFSET_VERSION = 1

_encode_offset = msgspec.msgpack.Encoder().encode
_decode_offset = msgspec.msgpack.Decoder(tuple[int, int, str, int, int, int, int]).decode


if TYPE_CHECKING:  # with a default, so that an annotation without a parameter means Any
    from typing_extensions import TypeVar

    E = TypeVar("E", default=Any)
else:
    from typing import TypeVar

    E = TypeVar("E")

#: Returns the payload of a row.
Decode = Callable[[TagRow], Any]


def decode_raw(row: TagRow) -> Any:
    """Return the payload that was appended."""
    return read_payload(row.encoded)


class TaggedEvent(msgspec.Struct, Generic[E], gc=False, eq=False):
    """An event with its journal, its number within the tag, and the offset to resume after it.

    Its payload is decoded on first access, so a stream that only counts or skips events costs little more than its
    rows.
    """

    row: TagRow
    _payload: Any = UNSET
    _decode: Decode = decode_raw

    @property
    def topic(self) -> str:
        """The topic of the event's journal."""
        return self.row.topic

    @property
    def id(self) -> str:
        """The id of the event's journal."""
        return self.row.id

    @property
    def tag(self) -> str:
        """The tag of the stream."""
        return self.row.tag

    @property
    def seq_nr(self) -> int:
        """The event's number in its journal."""
        return self.row.seq_nr

    @property
    def tag_seq_nr(self) -> int:
        """The event's number among its journal's events with this tag."""
        return self.row.tag_seq_nr

    @property
    def payload(self) -> E:
        """The payload that was appended; of a typed subscription, the object of its class."""
        payload: E = self._payload
        if payload is UNSET:
            self._payload = payload = self._decode(self.row)
        return payload

    @property
    def tags(self) -> frozenset[str]:
        """All tags of the event."""
        return frozenset(event_tags(self.row.encoded))

    @property
    def type(self) -> str | None:
        """The name of the event's type; None if it was appended without one."""
        return event_type_of(self.row.encoded)[0]

    @property
    def version(self) -> int:
        """The version of the event's type."""
        return event_type_of(self.row.encoded)[1]

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The metadata that was appended with the payload."""
        metadata = decode_event(self.row.encoded).metadata
        return None if metadata is None else decode_payload(JSON, metadata)

    @property
    def timestamp_ms(self) -> int:
        """When the log accepted the event, in milliseconds since 1970."""
        return self.row.timestamp_ms

    @property
    def partition(self) -> int:
        """The partition of the event's record."""
        return self.row.partition

    @property
    def offset(self) -> int:
        """The offset of the event's record."""
        return self.row.offset

    @property
    def place(self) -> TagPosition:
        """The event's position in the stream."""
        return self.row.place

    @property
    def tag_offset(self) -> str:
        """The offset to resume the stream after this event: an opaque string."""
        return encode_offset(self.row)

    @property
    def timestamp(self) -> datetime:
        """When the log accepted the event."""
        return datetime.fromtimestamp(self.row.timestamp_ms / 1000, UTC)

    @property
    def time_uuid(self) -> UUID:
        """A TimeUUID (version 1) derived from the event's position: unique, and the same for every reader.

        Its time is the stream's, in steps of 100 ns; to order events use `tag_offset`.
        """
        at = self.row
        ticks = at.time_ms * 10_000 + at.index % 10_000 + _GREGORIAN_TICKS
        where = f"{at.topic}\0{at.partition}\0{at.offset}\0{at.index}\0{at.epoch}".encode()
        tie = int.from_bytes(blake2b(where, digest_size=8).digest())
        node = tie & 0xFFFF_FFFF_FFFF | 0x0100_0000_0000  # the multicast bit, which no machine's address has
        fields = (ticks & 0xFFFF_FFFF, ticks >> 32 & 0xFFFF, ticks >> 48 & 0x0FFF, tie >> 56 & 0x3F, tie >> 48 & 0xFF)
        return UUID(fields=(*fields, node), version=1)

    def __eq__(self, other: object) -> bool:
        return self.row == other.row if isinstance(other, TaggedEvent) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.row)

    def __repr__(self) -> str:
        return (
            f"TaggedEvent({self.topic}/{self.id}, tag={self.tag!r}, seq_nr={self.seq_nr}, "
            f"tag_seq_nr={self.tag_seq_nr}, payload={self.payload!r})"
        )


def encode_offset(position: TagPosition | TagRow) -> str:
    """Encode a position as the offset to resume after it."""
    at = position
    fields = (_OFFSET_VERSION, at.time_ms, at.topic, at.partition, at.offset, at.index, at.epoch)
    return base64.urlsafe_b64encode(_encode_offset(fields)).decode().rstrip("=")


def decode_offset(tag: str, text: str) -> TagPosition:
    """Undo `encode_offset`; raise `InvalidInput` for any other string."""
    try:
        fields = _decode_offset(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidInput(
            f"{text[:60]!r} is not an offset of a stream by tag: use the tag_offset of an event"
        ) from error
    if fields[0] != _OFFSET_VERSION:
        raise InvalidInput(f"the offset has version {fields[0]}, but {_OFFSET_VERSION} is supported: upgrade Tidebook")
    return TagPosition(tag, *fields[1:])


def position_before(tag: str, time_ms: int) -> TagPosition:
    """Return the position before all rows of this time: a reader at it has read everything earlier."""
    return TagPosition(tag, time_ms, "", -1, -1, -1, -1)


def start_position(tag: str, after: str | datetime | None, first_ms: int) -> tuple[TagPosition | None, int]:
    """Return the position after which, and the time from which, a stream with this `after` starts."""
    if after is None:
        return None, first_ms
    if isinstance(after, str):
        position = decode_offset(tag, after)
        return position, position.time_ms
    if isinstance(after, datetime):
        if after.tzinfo is None:
            raise InvalidInput("a datetime needs a time zone, as in datetime.now(UTC)")
        return None, max(first_ms, int(after.timestamp() * 1000))
    raise InvalidInput(f"after must be an event's tag_offset, a datetime or None, not {type(after).__name__}")


def check_tag(tag: object) -> None:
    """Raise `InvalidInput` unless the tag is valid text and not empty."""
    if type(tag) is not str or not tag:
        raise InvalidInput("a tag must be non-empty text")
    encode_text(tag, "a tag")


def check_topics(topics: Iterable[str] | None) -> frozenset[str] | None:
    """Return the topics as a set, None for all; reject a string, which would be read as a list of characters."""
    if topics is None:
        return None
    if isinstance(topics, str | bytes):
        raise InvalidInput(f"topics must be a list of names, not a string: write topics=[{topics!r}]")
    names = frozenset(topics)
    for name in names:
        topic_name(name)
    return names
