"""A message as it will stand in Kafka: raw bytes, encoded upstream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.key import topic_name
from tidebook.sql.port.outbox import Headers

#: Header names that the relay writes itself.
RESERVED_PREFIX = "tidebook-"
HEADERS_MAX = 1000


class Message(msgspec.Struct, frozen=True, gc=False):
    """What is to be sent. `payload=None` is a tombstone; `partition_key` chooses the partition in the key's place.

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
    """Check what the caller gave and make a message of it; texts are written as UTF-8."""
    return Message(
        topic_name(topic),
        _payload(payload),
        _bytes(key, "key"),
        _bytes(partition_key, "partition_key"),
        _headers(headers) if headers else (),
    )


def all_checked(given: Iterable[object]) -> list[Message]:
    """The messages of a list, each checked."""
    try:
        each = iter(given)
    except TypeError as error:
        raise InvalidInput(
            f"publish_list takes a list of outbox.Message objects, not {type(given).__name__}"
        ) from error
    return [checked(one) for one in each]


def checked(given: object) -> Message:
    """A `Message` that somebody made by hand, checked."""
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
            raise InvalidInput(f"{name} is text that UTF-8 cannot write: {error}") from error
    raise InvalidInput(f"{name} is bytes, text or None, not {type(value).__name__}")


def _headers(headers: Any) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    checked: list[tuple[str, bytes | None]] = []
    try:
        for name, value in pairs:
            if type(name) is not str or not name or "\x00" in name:
                raise InvalidInput(f"a header's name is text without NUL that is not empty, not {name!r}")
            if name.startswith(RESERVED_PREFIX):
                raise InvalidInput(f"header {name!r}: names that begin with {RESERVED_PREFIX!r} are the relay's own")
            _bytes(name, "a header's name")
            checked.append((name, _bytes(value, f"header {name!r}")))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput("headers are a mapping of names to bytes, or a list of such pairs") from error
    if len(checked) > HEADERS_MAX:
        raise InvalidInput(f"a message takes at most {HEADERS_MAX:,} headers, not {len(checked):,}")
    return tuple(checked)
