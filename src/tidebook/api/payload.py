"""Payloads in JSON: a JSON value or text is written unchanged, and bytes as base64 under a separate name.

    {"payload": {"total": 3}}      {"payload": "text"}      {"payload_base64": "AAE="}

A payload that is a JSON string is text, as in Python. The names follow those of CloudEvents (`data`, `data_base64`).
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import BYTES, DEPTH_MAX, JSON, EncodedJson

#: Every whole number of fewer digits fits in 64 bits.
_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")
_encode = msgspec.json.Encoder().encode


def payloads_need_no_check(raw: bytes) -> bool:
    """Return whether the payloads in a JSON text that was decoded are certainly valid; False if each must be checked.

    A payload that the decoder accepts is invalid only if it is nested too deeply or contains a number that is too
    large. A text with few brackets is not nested too deeply, and a number with few digits fits in 64 bits.
    """
    return raw.count(b"{") + raw.count(b"[") <= DEPTH_MAX and _LONG_NUMBER.search(raw) is None


def checked_payload(value: Any) -> Any:
    """Return a payload that needs no check, in the form that an append encodes without checking it."""
    return value if type(value) is str or type(value) is bytes else EncodedJson(_encode(value))


def payload_from(value: Any, encoded: bytes | UnsetType, name: str = "payload") -> Any:
    """Return the payload of a request, which has exactly one of two names."""
    if encoded is UNSET:
        if value is UNSET:
            raise InvalidInput(f"set {name}, a JSON value or text, or {name}_base64, bytes in base64")
        return value
    if value is not UNSET:
        raise InvalidInput(f"set either {name} or {name}_base64, not both")
    return encoded


def payload_to(payload: Any) -> tuple[Any, bytes | UnsetType]:
    """Return the values of the two names for a payload; one of them is UNSET and is left out of the JSON."""
    return (UNSET, payload) if type(payload) is bytes else (payload, UNSET)


def encoded_payload_to(kind: int, data: bytes) -> tuple[Any, bytes | UnsetType]:
    """Return what `payload_to` returns for a payload that is already encoded; JSON is returned unchanged."""
    if kind == BYTES:
        return UNSET, data
    return (Raw(data) if kind == JSON else data.decode()), UNSET
