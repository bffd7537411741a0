"""The outbox's messages: bytes that the application has encoded, validated before they are published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.key import topic_name
from tidebook.outbox.port import Headers

#: The prefix of header names that the relay writes itself.
RESERVED_PREFIX = "tidebook-"
HEADERS_MAX = 1000


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


def message(
    *,
    topic: str,
    payload: bytes | bytearray | memoryview | None,
    key: bytes | str | None = None,
    partition_key: bytes | str | None = None,
    headers: Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]] | None = None,
) -> Message:
    """Validate the arguments and return a message; text is encoded as UTF-8."""
    return Message(
        topic_name(topic),
        _payload(payload),
        _bytes(key, "key"),
        _bytes(partition_key, "partition_key"),
        _headers(headers) if headers else (),
    )


def validate_messages(given: Iterable[object]) -> list[Message]:
    """Return the messages of an iterable, each validated."""
    try:
        each = iter(given)
    except TypeError as error:
        raise InvalidInput(
            f"publish_list takes a list of outbox.Message objects, not {type(given).__name__}"
        ) from error
    return [validate_message(one) for one in each]


def validate_message(given: object) -> Message:
    """Return a validated copy of a `Message` that was constructed directly."""
    if not isinstance(given, Message):
        raise InvalidInput(f"publish_list takes outbox.Message objects, not {type(given).__name__}")
    return message(
        topic=given.topic,
        payload=given.payload,
        key=given.key,
        partition_key=given.partition_key,
        headers=given.headers,
    )


def _payload(value: Any) -> bytes | None:
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytearray | memoryview | bytes):
        return bytes(value)
    raise InvalidInput(f"a payload is bytes (or None, a tombstone), not {type(value).__name__}: encode it first")


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
    raise InvalidInput(f"{name} is bytes, text or None, not {type(value).__name__}")


def _headers(headers: Any) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    validated: list[tuple[str, bytes | None]] = []
    try:
        for name, value in pairs:
            if type(name) is not str or not name or "\x00" in name:
                raise InvalidInput(f"a header's name is text without NUL that is not empty, not {name!r}")
            if name.startswith(RESERVED_PREFIX):
                raise InvalidInput(
                    f"header {name!r}: names that begin with {RESERVED_PREFIX!r} are reserved for the relay"
                )
            _bytes(name, "a header's name")
            validated.append((name, _bytes(value, f"header {name!r}")))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput("headers are a mapping of names to bytes, or a list of such pairs") from error
    if len(validated) > HEADERS_MAX:
        raise InvalidInput(f"a message takes at most {HEADERS_MAX:,} headers, not {len(validated):,}")
    return tuple(validated)
