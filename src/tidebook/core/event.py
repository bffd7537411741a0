"""Events as a user appends them, as they are encoded in log and store, and as a reader receives them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Generic

import msgspec

from tidebook.core.bounds import DECODE_ERRORS, STRICT_DECODE_ERRORS
from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.payload import BYTES, JSON, EncodedJson, decode_payload, encode_json, encode_payload, encode_text

if TYPE_CHECKING:  # the default lets `Event` stand for `Event[Any]`
    from typing_extensions import TypeVar

    P = TypeVar("P", default=Any, covariant=True)
else:
    from typing import TypeVar

    P = TypeVar("P", covariant=True)

TAG_BYTES_MAX = 200
TAGS_BYTES_MAX = 16_384
TYPE_BYTES_MAX = 200
TYPE_VERSION_MAX = 2**31 - 1
#: An event with more tags than this causes a warning, because each tag costs a row. The number has no limit.
TAGS_WARN = 10

#: Stands for the payload type of an append that is not plain: one with more than a single payload.
NOT_PLAIN = -1

#: An event in encodable form: the fields of an `EncodedEvent`, without the last ones if they have their defaults.
_Encodable = tuple[Any, ...]

#: The number of events that carry each tag, sorted by tag.
TagCounts = tuple[tuple[str, int], ...]


class Event(Generic[P]):
    """An event to be appended: a payload, optionally with tags, metadata, and the name and version of its type.

    >>> Event({"total": 3}, tags={"paid"})
    Event({'total': 3}, tags={'paid'})
    """

    __slots__ = ("metadata", "payload", "tags", "type", "version")

    def __init__(
        self,
        payload: P,
        *,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        type: str | None = None,
        version: int = 1,
    ) -> None:
        if isinstance(tags, str):
            raise InvalidInput(f"tags must be a set of strings: write {{{tags!r}}}")
        self.payload = payload
        try:
            self.tags = frozenset(tags)
        except TypeError as error:
            raise InvalidInput(f"tags must be a set of strings, not {tags.__class__.__name__}: {error}") from error
        self.metadata = metadata
        self.type = type
        self.version = version

    def __repr__(self) -> str:
        more = f", tags={set(self.tags)!r}" if self.tags else ""
        more += f", metadata={self.metadata!r}" if self.metadata is not None else ""
        more += f", type={self.type!r}, version={self.version}" if self.type is not None else ""
        return f"Event({self.payload!r}{more})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event):
            return NotImplemented
        return _fields(self) == _fields(other)

    __hash__ = None  # type: ignore[assignment]


_fields = attrgetter(*Event.__slots__)


class EncodedEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """An event as it is encoded in log and store, to which the payload and the metadata are opaque bytes.

    Unknown fields are rejected, as in an action: a new field requires a new version of the record format.
    """

    payload_type: Annotated[int, msgspec.Meta(ge=JSON, le=BYTES)]
    payload: bytes
    tags: tuple[str, ...] = ()
    #: A JSON object.
    metadata: bytes | None = None
    #: The name of the event's type, and its version; None for an event without a type.
    type: Annotated[str, msgspec.Meta(min_length=1, max_length=TYPE_BYTES_MAX)] | None = None
    version: Annotated[int, msgspec.Meta(ge=1, le=TYPE_VERSION_MAX)] = 1


class _PlainEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """An EncodedEvent with a payload only, which decodes faster."""

    payload_type: Annotated[int, msgspec.Meta(ge=JSON, le=BYTES)]
    payload: bytes


class _PayloadOnly(msgspec.Struct, frozen=True, array_like=True, gc=False):
    payload_type: int
    payload: bytes


class _TagsOnly(msgspec.Struct, frozen=True, array_like=True, gc=False):
    payload_type: int
    payload: msgspec.Raw
    tags: tuple[str, ...] = ()


class _TypeOnly(msgspec.Struct, frozen=True, array_like=True, gc=False):
    payload_type: int
    payload: msgspec.Raw
    tags: msgspec.Raw = msgspec.Raw(b"\x90")
    metadata: msgspec.Raw = msgspec.Raw(b"\xc0")
    type: str | None = None
    version: int = 1


class ReadEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as a reader receives it."""

    seq_nr: int
    payload: Any
    tags: frozenset[str]
    metadata: dict[str, Any] | None
    timestamp_ms: int
    partition: int
    offset: int
    #: The name of the event's type; None if it was appended without one.
    type: str | None = None
    #: The version of the type.
    version: int = 1

    @property
    def timestamp(self) -> datetime:
        """The time at which the log accepted the event, in UTC."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EncodedEvent).decode
_decode_all = msgspec.msgpack.Decoder(list[EncodedEvent]).decode
_decode_plain = msgspec.msgpack.Decoder(list[_PlainEvent]).decode
_decode_payload = msgspec.msgpack.Decoder(_PayloadOnly).decode
_decode_tags = msgspec.msgpack.Decoder(_TagsOnly).decode
_decode_type = msgspec.msgpack.Decoder(_TypeOnly).decode
#: The first byte of an encoded event that is only a payload: an array of two.
_PLAIN_HEADER = b"\x92"
#: The number of length bytes of msgpack's array 16 and array 32; a fixarray has its length in the first byte.
_LENGTH_BYTES = {0xDC: 2, 0xDD: 4}
_decode_many = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...]).decode
_SHORT_ARRAYS = [bytes([0x90 | count]) for count in range(16)]
_ONE_EVENT = _SHORT_ARRAYS[1]


def encode_event(event: Event) -> bytes:
    """Validate and encode an event."""
    if not isinstance(event, Event):
        raise _not_an_event(event)
    return _encode(_encodable(event))


def _encodable(event: Event) -> _Encodable:
    """Validate an event and return it in encodable form: only the payload if it has nothing else."""
    payload_type, payload = encode_payload(event.payload)
    if not event.tags and event.metadata is None:
        if event.type is None:
            return payload_type, payload
        return payload_type, payload, (), None, *check_type(event.type, event.version)
    tags = tuple(sorted({_check_tag(tag) for tag in event.tags}))  # the attribute may have been set to a list
    if sum(map(len, tags)) > TAGS_BYTES_MAX:
        raise InvalidInput(f"the tags of one event must not exceed {TAGS_BYTES_MAX:,} characters in total")
    if len(tags) > TAGS_WARN:
        warnings.warn(f"an event with {len(tags)} tags: each costs a row in the tag view", stacklevel=3)
    metadata = None
    if event.metadata is not None:
        if not isinstance(event.metadata, Mapping):
            raise InvalidInput(f"an event's metadata must be a JSON object, not {type(event.metadata).__name__}")
        metadata = encode_json(dict(event.metadata), "an event's metadata")
    if event.type is None:
        return payload_type, payload, tags, metadata
    return payload_type, payload, tags, metadata, *check_type(event.type, event.version)


def plain_payload(events: Sequence[Event]) -> tuple[int, bytes]:
    """Return the type and the bytes of the payload of a plain append: one event that is only a payload.

    Any other append has type NOT_PLAIN and no bytes.
    """
    if type(events) is list and len(events) == 1:
        event = events[0]
        if type(event) is Event and not event.tags and event.metadata is None and event.type is None:
            payload = event.payload
            return (BYTES, payload) if type(payload) is bytes else encode_payload(payload)
    return NOT_PLAIN, b""


def plain_payloads(appends: Iterable[Sequence[Event]]) -> tuple[list[int], list[bytes]]:
    """Return `plain_payload` of each append; two lists instead of pairs spare the garbage collector many tuples."""
    types: list[int] = []
    payloads: list[bytes] = []
    for events in appends:
        payload_type, payload = plain_payload(events)
        types.append(payload_type)
        payloads.append(payload)
    return types, payloads


def encode_events(events: Sequence[Event]) -> tuple[bytes, TagCounts]:
    """Encode the events into the body of an append and count their tags, in one pass.

    The tags are counted as they were encoded, because `check_events` compares the two.
    """
    encoded: list[_Encodable] = []
    counts: dict[str, int] = {}
    for event in events:
        if not isinstance(event, Event):
            raise _not_an_event(event)
        payload = event.payload
        is_plain = not event.tags and event.metadata is None and event.type is None
        if is_plain and type(payload) is bytes:
            encoded.append((BYTES, payload))
        elif is_plain and type(payload) is EncodedJson:
            encoded.append((JSON, payload.data))
        else:
            encodable = _encodable(event)
            encoded.append(encodable)
            if len(encodable) > 2:
                for tag in encodable[2]:
                    counts[tag] = counts.get(tag, 0) + 1
    return _encode(encoded), tuple(sorted(counts.items()))


def _not_an_event(given: object) -> InvalidInput:
    return InvalidInput(
        f"events must be tidebook.Event objects, not {type(given).__name__}: wrap the payload in Event(...)"
    )


def _check_tag(tag: object) -> str:
    if type(tag) is not str or not tag:
        raise InvalidInput(f"a tag must be a non-empty string, not {tag!r}")
    size = len(encode_text(tag, "a tag"))
    if size > TAG_BYTES_MAX or "\x00" in tag:
        raise InvalidInput(f"a tag must have at most {TAG_BYTES_MAX} bytes and no NUL: {tag[:40]!r} has {size}")
    return tag


def check_type(name: object, version: object) -> tuple[str, int]:
    """Return the name and the version of an event's type; raise InvalidInput if one of them is not valid."""
    try:
        return _checked_type(name, version)
    except TypeError as error:  # not hashable
        raise InvalidInput(f"an event's type must be a string and its version a whole number: {error}") from error


@lru_cache(512, typed=True)  # a service has few event types; typed: True differs from 1
def _checked_type(name: object, version: object) -> tuple[str, int]:
    if type(name) is not str or not name:
        raise InvalidInput(f"the name of an event's type must be a non-empty string, not {name!r}")
    encode_text(name, "the name of an event's type")
    if not _is_valid_type(name):
        raise InvalidInput(f"the name of a type must have at most {TYPE_BYTES_MAX} bytes and no NUL: {name[:40]!r}")
    if type(version) is not int or not 1 <= version <= TYPE_VERSION_MAX:
        raise InvalidInput(f"the version of type {name!r} must be a whole number of at least 1, not {version!r}")
    return name, version


def decode_event(encoded: bytes | msgspec.Raw) -> EncodedEvent:
    """Decode an event, leaving its payload and metadata as bytes; raise Corrupt for damaged bytes."""
    try:
        return _decode(encoded)
    except DECODE_ERRORS as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error


def decode_events(encoded: Iterable[bytes]) -> list[EncodedEvent]:
    """Decode several events, as `decode_event` does."""
    try:
        return [_decode(event) for event in encoded]
    except DECODE_ERRORS as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error


def event_tags(encoded: bytes) -> tuple[str, ...]:
    """Return the tags of an encoded event without decoding the rest."""
    try:
        return _decode_tags(encoded).tags
    except DECODE_ERRORS as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error


def event_type_of(encoded: bytes) -> tuple[str | None, int]:
    """Return the name (None if it has no type) and the version of an encoded event's type, decoding nothing else."""
    if encoded[:1] == _PLAIN_HEADER:
        return None, 1
    try:
        event = _decode_type(encoded)
    except DECODE_ERRORS as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error
    return event.type, event.version


def restore_event(encoded: bytes | msgspec.Raw) -> Event:
    """Decode an event, with its payload and metadata, to append it again; raise Corrupt for damaged bytes."""
    event = decode_event(encoded)
    return Event(
        decode_payload(event.payload_type, event.payload),
        tags=event.tags,
        metadata=None if event.metadata is None else decode_payload(JSON, event.metadata),
        type=event.type,
        version=event.version,
    )


def read_payload(encoded: bytes) -> Any:
    """Return the payload of an encoded event without decoding the rest."""
    try:
        event = _decode_payload(encoded)
    except DECODE_ERRORS as error:
        raise Corrupt(f"an event's bytes are damaged: {error}") from error
    return decode_payload(event.payload_type, event.payload)


def pack_events(encoded: Sequence[bytes]) -> bytes:
    """Return the body of an append record: a msgpack array of its events, which are already msgpack."""
    count = len(encoded)
    if count < 16:
        header = _SHORT_ARRAYS[count]
    elif count < 1 << 16:
        header = b"\xdc" + count.to_bytes(2, "big")
    else:
        header = b"\xdd" + count.to_bytes(4, "big")
    return b"".join((header, *encoded))


def check_events(body: bytes, count: int, tagged: TagCounts) -> None:
    """Check that a body is what `encode_events` returns for `count` events with the tag counts `tagged`.

    Raise Corrupt otherwise. Payloads and metadata are not decoded: only the reader of an event interprets them.
    """
    # Check the length first: a few bytes can declare an arbitrarily large array.
    if _declared_count(body) != count:
        raise Corrupt(f"the append declares {count} events, but its body has {_declared_count(body)}")
    start = 1 + _LENGTH_BYTES.get(body[0], 0)
    if not tagged and body[start : start + 1] == _PLAIN_HEADER:
        try:
            _decode_plain(body)
            return
        except STRICT_DECODE_ERRORS:
            pass  # an event has more than a payload, or the body is damaged
    try:
        events = _decode_all(body)
    except STRICT_DECODE_ERRORS as error:
        raise Corrupt(f"the events of a record are damaged: {error}") from error
    _check_types_and_tags(events, tagged)


def _declared_count(body: bytes) -> int:
    """Return the length that the header of a body's msgpack array declares."""
    kind = body[0] if body else 0
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    if kind in _LENGTH_BYTES:
        return int.from_bytes(body[1 : 1 + _LENGTH_BYTES[kind]], "big")
    raise Corrupt("the events of a record are damaged: they are not an array")


def _check_types_and_tags(events: Sequence[EncodedEvent], tagged: TagCounts) -> None:
    """Check the types and tags of decoded events by the rules of `encode_event`, and that `tagged` counts them."""
    counts: dict[str, int] = {}
    for event in events:
        tags = event.tags
        if event.type is not None and not _is_valid_type(event.type):
            raise Corrupt(f"the type of an event is damaged: it has a NUL or more than {TYPE_BYTES_MAX} bytes")
        if not _are_valid_tags(tags):
            raise Corrupt(
                "the tags of an event are damaged: one is empty, has a NUL or more than "
                f"{TAG_BYTES_MAX} bytes or is repeated, or their total length is over the limit"
            )
        for tag in tags:
            counts[tag] = counts.get(tag, 0) + 1
    if len(tagged) != len(counts) or dict(tagged) != counts:
        raise Corrupt("the tag counts of the append differ from the tags of its events")


@lru_cache(512)
def _is_valid_type(name: str) -> bool:
    """Return whether `encode_event` could have written this type name."""
    return bool(name) and "\x00" not in name and len(name.encode()) <= TYPE_BYTES_MAX


@lru_cache(512)  # most events of a topic carry the same few tags
def _are_valid_tags(tags: tuple[str, ...]) -> bool:
    """Return whether `encode_event` could have written these tags."""
    return (
        len(set(tags)) == len(tags)
        and sum(map(len, tags)) <= TAGS_BYTES_MAX
        and all(tag and "\x00" not in tag and len(tag.encode()) <= TAG_BYTES_MAX for tag in tags)
    )


def unpack_events(body: bytes) -> list[bytes]:
    """Split the body of an append into its encoded events."""
    if body[:1] == _ONE_EVENT:
        return [body[1:]]  # `check_events` has validated the body
    try:
        return [bytes(raw) for raw in _decode_many(body)]
    except DECODE_ERRORS as error:
        raise Corrupt(f"the events of a record are damaged: {error}") from error
