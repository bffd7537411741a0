"""Encode and decode payloads: JSON values, text or bytes. Decoding returns the type that was encoded."""

from __future__ import annotations

from math import isfinite
from typing import Any, Final

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, format_int

JSON: Final = 0
TEXT: Final = 1
BYTES: Final = 2

TYPE_NAMES: Final = ("json", "text", "bytes")
DEPTH_MAX: Final = 100
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


class EncodedJson(msgspec.Struct, frozen=True, gc=False):
    """A JSON payload that is already encoded."""

    data: bytes


_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode


def encode_payload(value: object) -> tuple[int, bytes]:
    """Return the payload's type and bytes; raise InvalidInput if the value cannot be encoded.

    >>> encode_payload({"total": 3})
    (0, b'{"total":3}')
    """
    if type(value) is bytes:
        return BYTES, value
    if type(value) is str:
        return TEXT, encode_text(value, "a payload")
    if type(value) is EncodedJson:
        return JSON, value.data
    return JSON, encode_json(value, "a payload")


def decode_payload(type_: int, data: bytes) -> Any:
    """Undo `encode_payload`; raise Corrupt for bytes that it cannot have written."""
    try:
        if type_ == JSON:
            return _decode_json(data)
        if type_ == BYTES:
            return data
        if type_ == TEXT:
            return data.decode()
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"a payload's bytes are damaged: {error}") from error
    raise Corrupt(f"payload type {type_} is unknown")


def decode_json(data: bytes) -> Any:
    """Parse JSON that a user has given; raise ValueError if it is invalid or nested too deep."""
    try:
        return _decode_json(data)
    except RecursionError as error:
        raise ValueError(f"it is nested too deep: {error}") from error


def encode_text(value: str, label: str) -> bytes:
    """Encode text as UTF-8; raise InvalidInput, whose message begins with `label`, if it contains lone surrogates."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{label} must be valid Unicode text: {error}") from error


def encode_json(value: object, label: str) -> bytes:
    """Encode a JSON value; raise InvalidInput, whose message begins with `label`, if decoding would change it."""
    _check_json(value, label, 0)
    try:
        return _encode_json(value)
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{label} must be valid Unicode text: {error}") from error


def _check_json(value: object, label: str, depth: int) -> None:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return
    if kind is int:
        if not _INT_MIN <= value <= _INT_MAX:  # type: ignore[operator]
            number = format_int(value)  # type: ignore[arg-type]
            raise InvalidInput(f"{label} holds {number}, which does not fit in 64 bits: send it as text")
    elif kind is float:
        if not isfinite(value):  # type: ignore[arg-type]
            raise InvalidInput(f"{label} holds {value}, which is not a JSON value")
    elif depth >= DEPTH_MAX:
        raise InvalidInput(f"{label} is nested deeper than {DEPTH_MAX} levels, or contains itself")
    elif kind is dict:
        for name, item in value.items():  # type: ignore[attr-defined]
            if type(name) is not str:
                raise InvalidInput(f"{label} has the name {name!r}: names in a JSON object are text")
            _check_json(item, label, depth + 1)
    elif kind is list:
        for item in value:  # type: ignore[attr-defined]
            _check_json(item, label, depth + 1)
    else:
        raise InvalidInput(
            f"{label} must be made of dict, list, str, int, float, bool and None, or be text or bytes as a whole, "
            f"not {kind.__name__}"
        )
