"""Events: what a user appends, what is kept, and what a reader gets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.payload import BYTES, JSON, decode_payload, encode_json, encode_payload, encode_text

TAG_BYTES_MAX = 200
TAGS_BYTES_MAX = 16_384
#: From here on a warning says that every tag costs a row; there is no limit of their number.
TAGS_WARN = 10

#: Instead of a payload's type: there is more than a payload.
NOT_PLAIN = -1

#: How many events carry each tag, by tag.
TagCounts = tuple[tuple[str, int], ...]


class Event:
    """Something that happened, to be appended.

    >>> Event({"total": 3}, tags={"paid"})
    Event({'total': 3}, tags={'paid'})
    """

    __slots__ = ("metadata", "payload", "tags")

    def __init__(self, payload: Any, *, tags: Iterable[str] = (), metadata: Mapping[str, Any] | None = None) -> None:
        if isinstance(tags, str):
            raise InvalidInput(f"tags are a set of texts: write {{{tags!r}}}")
        self.payload = payload
        try:
            self.tags = frozenset(tags)
        except TypeError as error:
            raise InvalidInput(f"tags are a set of texts, not {type(tags).__name__}: {error}") from error
        self.metadata = metadata

    def __repr__(self) -> str:
        more = f", tags={set(self.tags)!r}" if self.tags else ""
        more += f", metadata={self.metadata!r}" if self.metadata is not None else ""
        return f"Event({self.payload!r}{more})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        return (self.payload, self.tags, self.metadata) == (other.payload, other.tags, other.metadata)

    __hash__ = None  # type: ignore[assignment]


class KeptEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event as log and store keep it: opaque bytes to both of them."""

    payload_type: int
    payload: bytes
    tags: tuple[str, ...] = ()
    #: A JSON object.
    metadata: bytes | None = None


class _PayloadOnly(msgspec.Struct, frozen=True, array_like=True, gc=False):
    payload_type: int
    payload: bytes


class _TagsOnly(msgspec.Struct, frozen=True, array_like=True, gc=False):
    payload_type: int
    payload: msgspec.Raw
    tags: tuple[str, ...] = ()


class ReadEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as a reader gets it."""

    seq_nr: int
    payload: Any
    tags: frozenset[str]
    metadata: dict[str, Any] | None
    timestamp_ms: int
    partition: int
    offset: int

    @property
    def timestamp(self) -> datetime:
        """When the log took it."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KeptEvent).decode
_decode_payload = msgspec.msgpack.Decoder(_PayloadOnly).decode
_decode_tags = msgspec.msgpack.Decoder(_TagsOnly).decode
_skip = msgspec.msgpack.Decoder(msgspec.Raw).decode
#: msgpack's array 16 and array 32, by the bytes of their length; shorter ones have it in the first byte.
_LENGTH_BYTES = {0xDC: 2, 0xDD: 4}
_decode_many = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...]).decode
_SHORT_ARRAYS = [bytes([0x90 | count]) for count in range(16)]
_ONE_EVENT = _SHORT_ARRAYS[1]
_NO_TAGS: frozenset[str] = frozenset()


def encode_event(event: Event) -> bytes:
    """Check an event and encode it."""
    if not isinstance(event, Event):
        raise _no_event(event)
    return _encode(_kept(event))


def _kept(event: Event) -> KeptEvent | tuple[int, bytes]:
    """What is encoded of an event: the payload alone where there is nothing else."""
    payload_type, payload = encode_payload(event.payload)
    if not event.tags and event.metadata is None:
        return payload_type, payload
    tags = tuple(sorted(_tag(tag) for tag in event.tags))
    if sum(map(len, tags)) > TAGS_BYTES_MAX:
        raise InvalidInput(f"the tags of one event may take {TAGS_BYTES_MAX:,} characters together")
    if len(tags) > TAGS_WARN:
        warnings.warn(f"an event with {len(tags)} tags: each costs a row in the tag view", stacklevel=3)
    metadata = None
    if event.metadata is not None:
        metadata = encode_json(_object(event.metadata), "an event's metadata")
    return KeptEvent(payload_type, payload, tags, metadata)


def plain_payloads(appends: Iterable[Sequence[Event]]) -> tuple[list[int], list[bytes]]:
    """Types and bytes of the payloads, where a payload is all that there is: one event without tags or metadata.

    Others have type -1 and no bytes. Two lists and not one of pairs: with thousands of them the garbage collector would
    look at each pair.
    """
    types, payloads = list[int](), list[bytes]()
    for events in appends:
        if type(events) is list and len(events) == 1:
            event = events[0]
            if type(event) is Event and not event.tags and event.metadata is None:
                payload = event.payload
                payload_type, payload = (BYTES, payload) if type(payload) is bytes else encode_payload(payload)
                types.append(payload_type)
                payloads.append(payload)
                continue
        types.append(NOT_PLAIN)
        payloads.append(b"")
    return types, payloads


def encode_events(events: Sequence[Event]) -> tuple[bytes, TagCounts]:
    """`pack_events` of `encode_event` of each, and `count_tags` of them, in one pass."""
    kept: list[KeptEvent | tuple[int, bytes]] = []
    tagged = False
    for event in events:
        if not isinstance(event, Event):
            raise _no_event(event)
        payload = event.payload
        if type(payload) is bytes and not event.tags and event.metadata is None:
            kept.append((BYTES, payload))
        else:
            kept.append(_kept(event))
            tagged = tagged or bool(event.tags)
    return _encode(kept), count_tags(events) if tagged else ()


def _no_event(given: object) -> InvalidInput:
    return InvalidInput(
        f"events are tidebook.Event objects, not {type(given).__name__}: wrap the payload in Event(...)"
    )


def _tag(tag: object) -> str:
    if type(tag) is not str or not tag:
        raise InvalidInput(f"a tag is a text that is not empty, not {tag!r}")
    size = len(encode_text(tag, "a tag"))
    if size > TAG_BYTES_MAX or "\x00" in tag:
        raise InvalidInput(f"a tag may take {TAG_BYTES_MAX} bytes and no NUL: {tag[:40]!r} takes {size}")
    return tag


def _object(value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"an event's metadata is a JSON object, not {type(value).__name__}")
    return dict(value)


def count_tags(events: Iterable[Event]) -> TagCounts:
    """How many of the events carry each tag."""
    counts: dict[str, int] = {}
    for event in events:
        if event.tags:
            for tag in event.tags:
                counts[tag] = counts.get(tag, 0) + 1
    return tuple(sorted(counts.items())) if counts else ()


def decode_event(kept: bytes | msgspec.Raw) -> KeptEvent:
    """Undo `encode_event` up to the payload, which stays bytes."""
    try:
        return _decode(kept)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error


def decode_events(kept: Iterable[bytes]) -> list[KeptEvent]:
    """`decode_event` for many."""
    try:
        return [_decode(each) for each in kept]
    except msgspec.MsgspecError as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error


def event_tags(kept: bytes) -> tuple[str, ...]:
    """The tags of a kept event, the rest of it untouched."""
    try:
        return _decode_tags(kept).tags
    except msgspec.MsgspecError as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error


def read_payload(kept: bytes) -> Any:
    """The payload of a kept event, the rest of it untouched."""
    try:
        found = _decode_payload(kept)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error
    return decode_payload(found.payload_type, found.payload)


def pack_events(kept: Sequence[bytes]) -> bytes:
    """The body of an append record: a msgpack array of its events, which are msgpack already."""
    count = len(kept)
    if count < 16:
        head = _SHORT_ARRAYS[count]
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return b"".join((head, *kept))


def count_events(body: bytes) -> int:
    """How many events a body holds, found without taking them apart; a body that is not whole is Corrupt."""
    try:
        _skip(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the events of a record are damaged: {error}") from error
    kind = body[0]
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    if kind in _LENGTH_BYTES:
        return int.from_bytes(body[1 : 1 + _LENGTH_BYTES[kind]], "big")
    raise Corrupt("the events of a record are damaged: they are no list")


def unpack_events(body: bytes) -> list[bytes]:
    """The events of a body, each still encoded."""
    if body[:1] == _ONE_EVENT:
        return [body[1:]]  # `count_events` has seen that it is whole
    try:
        return [bytes(raw) for raw in _decode_many(body)]
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the events of a record are damaged: {error}") from error


def read_event(kept: bytes, seq_nr: int, timestamp_ms: int, partition: int, offset: int) -> ReadEvent:
    """A kept event as readers get it. Every event that is read passes here, so it calls as little as it can."""
    try:
        event = _decode(kept)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error
    kind, payload, tags, metadata = event.payload_type, event.payload, event.tags, event.metadata
    return ReadEvent(
        seq_nr,
        payload if kind == BYTES else decode_payload(kind, payload),
        frozenset(tags) if tags else _NO_TAGS,
        None if metadata is None else decode_payload(JSON, metadata),
        timestamp_ms,
        partition,
        offset,
    )
