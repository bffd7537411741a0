"""The outbox's messages, validated before they are published: bytes for a topic, or an append to a journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, Required, TypedDict

import msgspec

from tidebook.core.action import NEVER, expiry_ms
from tidebook.core.bounds import DECODE_ERRORS, EVENTS_MAX
from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.core.event import Event, encode_event, restore_event
from tidebook.core.key import journal_id, topic_name
from tidebook.core.seq_nr import seq_nr

#: The prefix of header names that the relay writes itself.
RESERVED_PREFIX = "tidebook-"
HEADERS_MAX = 1000
#: The prefix of a journal's topic in the outbox; no Kafka topic name can contain it.
PREFIX = "journal:"

Headers = tuple[tuple[str, bytes | None], ...]

_encode_headers = msgspec.msgpack.Encoder().encode
_decode_headers = msgspec.msgpack.Decoder(Headers).decode


def pack_headers(headers: Headers) -> bytes | None:
    """Return headers as the column stores them: a MessagePack list of pairs, or NULL for none."""
    return _encode_headers(headers) if headers else None


def unpack_headers(packed: bytes | None) -> Headers:
    """Return the headers of a stored column; the inverse of `pack_headers`."""
    return _decode_headers(packed) if packed else ()


class Keyed(Protocol):
    """An object with a key, such as a message in any of its forms."""

    @property
    def key(self) -> bytes | None: ...
    @property
    def partition_key(self) -> bytes | None: ...


def order_key(message: Keyed) -> bytes | None:
    """Return the key by which order is kept: messages that share it share a partition."""
    return message.key if message.partition_key is None else message.partition_key


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message to publish. `payload=None` is a tombstone; `partition_key` replaces the key in choosing the partition.

    >>> Message("orders", b"...", key=b"1").topic
    'orders'
    """

    topic: str
    payload: bytes | None
    key: bytes | None = None
    partition_key: bytes | None = None
    headers: Headers = ()


Value = bytes | str | None
Payload = bytes | bytearray | memoryview | None
Pairs = Mapping[str, Value] | Iterable[tuple[str, Value]]


class MessageFields(TypedDict, total=False):
    """The fields of a message, as `publish` takes them; text is encoded as UTF-8."""

    topic: Required[str]
    payload: Required[Payload]
    key: Value
    partition_key: Value
    headers: Pairs | None


def message(
    *, topic: str, payload: Payload, key: Value = None, partition_key: Value = None, headers: Pairs | None = None
) -> Message:
    """Validate the fields and return a message."""
    if payload is not None and not isinstance(payload, bytes | bytearray | memoryview):
        raise InvalidInput(f"a payload must be bytes, or None for a tombstone, not {type(payload).__name__}")
    return Message(
        topic_name(topic),
        _bytes(payload, "payload"),
        _bytes(key, "key"),
        _bytes(partition_key, "partition_key"),
        _headers(headers) if headers else (),
    )


def with_header(given: Message, name: str, value: bytes) -> Message:
    """Return the message with the header added, unless it has one of this name or no room for another."""
    if len(given.headers) >= HEADERS_MAX or any(each == name for each, _ in given.headers):
        return given
    return msgspec.structs.replace(given, headers=(*given.headers, (name, value)))


def validate_messages(given: Iterable[object]) -> list[Message]:
    """Return validated copies of `Message` objects, which may have been constructed with any values."""
    try:
        each = iter(given)
    except TypeError as error:
        raise InvalidInput(
            f"publish_list takes a list of outbox.Message objects, not {type(given).__name__}"
        ) from error
    validated = []
    for one in each:
        if not isinstance(one, Message):
            raise InvalidInput(f"publish_list takes outbox.Message objects, not {type(one).__name__}")
        topic, payload, key, partition_key, headers = msgspec.structs.astuple(one)
        validated.append(message(topic=topic, payload=payload, key=key, partition_key=partition_key, headers=headers))
    return validated


def _bytes(value: Any, name: str) -> bytes | None:
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytearray | memoryview | bytes):
        return bytes(value)
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"{name} is text that cannot be encoded as UTF-8: {error}") from error
    raise InvalidInput(f"{name} must be bytes, str or None, not {type(value).__name__}")


def _headers(headers: Any) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    validated: list[tuple[str, bytes | None]] = []
    try:
        for name, value in pairs:
            if type(name) is not str or not name or "\x00" in name:
                raise InvalidInput(f"a header's name must be non-empty text without NUL, not {name!r}")
            if name.startswith(RESERVED_PREFIX):
                raise InvalidInput(
                    f"header {name!r}: names that begin with {RESERVED_PREFIX!r} are reserved for the relay"
                )
            _bytes(name, "a header's name")
            validated.append((name, _bytes(value, f"header {name!r}")))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput("headers must be a mapping of names to bytes, or a list of such pairs") from error
    if len(validated) > HEADERS_MAX:
        raise InvalidInput(f"a message may have at most {HEADERS_MAX:,} headers, not {len(validated):,}")
    return tuple(validated)


# ---- appends to journals


class JournalAppend(msgspec.Struct, frozen=True, array_like=True):
    """The append to make; its events are encoded as the journal stores them."""

    id: str
    events: tuple[bytes, ...]
    expected: int | None = None
    #: Milliseconds, or NEVER.
    expire_after: int | None = None

    def decoded_events(self) -> list[Event]:
        """Return the events as the caller gave them."""
        return [restore_event(each) for each in self.events]

    def expiry(self) -> timedelta | int | None:
        """Return the expiry in the form that `Journal.append` takes."""
        if self.expire_after is None or self.expire_after == NEVER:
            return self.expire_after
        return timedelta(milliseconds=self.expire_after)


_encode_append = msgspec.msgpack.Encoder().encode
_decode_append = msgspec.msgpack.Decoder(JournalAppend).decode


def journal_message(
    topic: str,
    id: str,
    events: Sequence[Event],
    *,
    expected: int | None = None,
    expire_after: timedelta | int | None = None,
) -> Message:
    """Validate an append and return it as a message, keyed by the journal's id."""
    given: object = events
    if isinstance(given, Event | str | bytes) or not isinstance(given, Sequence) or not given:
        raise InvalidInput("events must be a list of at least one tidebook.Event object")
    if len(events) > EVENTS_MAX:
        raise InvalidInput(f"an append may have at most {EVENTS_MAX:,} events, not {len(events):,}: split it")
    if expected is not None:
        seq_nr(expected, name="expected", least=0)
    encoded = tuple(encode_event(event) for event in events)
    append = JournalAppend(journal_id(id), encoded, expected, expiry_ms(expire_after))
    return Message(PREFIX + topic_name(topic), _encode_append(append), key=id.encode())


def read_journal_message(payload: bytes | None) -> JournalAppend:
    """Return the append of a payload; raise Corrupt if it is not one. The inverse of `journal_message`."""
    try:
        return _decode_append(payload or b"")
    except DECODE_ERRORS as error:
        raise Corrupt(f"the payload is not an append to a journal: {error}") from error
