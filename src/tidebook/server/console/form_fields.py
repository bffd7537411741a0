"""Decode the parameters of pages and the fields of forms, and find those that an address must contain."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from tidebook.core.errors import InvalidInput

FIELDS_MAX: Final = 2_000
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def parse_form(body: bytes) -> list[tuple[str, str]]:
    """Return the fields of a form that a browser sent, with CRLF replaced by LF."""
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise InvalidInput(f"the form is not valid: {error}") from error
    return [(name, value.replace("\r\n", "\n")) for name, value in pairs]


def decode_query(type_: type[msgspec.Struct], raw: bytes) -> Any:
    """Return the parameters of a page or an act from a query string."""
    return decode_fields(type_, dict(parse_form(raw)))


def decode_fields(type_: type[msgspec.Struct], given: dict[str, str]) -> Any:
    """Return the parameters of a page or an act; empty ones are treated as not given, unknown ones are left out."""
    known = {field.name: field.type for field in msgspec.structs.fields(type_)}
    values = {name: value for name, value in given.items() if value != "" and name in known}
    for name, value in values.items():
        try:
            msgspec.convert(value, known[name], strict=False)
        except _DECODE_ERRORS as error:
            expected = str(error).partition(", got")[0].replace(" | null", "")
            raise InvalidInput(f"{name} cannot be {value[:40]!r}: {expected}") from error
    try:
        return msgspec.convert(values, type_, strict=False)
    except _DECODE_ERRORS as error:
        raise InvalidInput(f"a parameter is missing: {error}") from error


def given_fields(fields: msgspec.Struct) -> dict[str, Any]:
    """Return the parameters that differ from their defaults."""
    given = {field.name: getattr(fields, field.name) for field in msgspec.structs.fields(fields)}
    defaults = {field.name: field.default for field in msgspec.structs.fields(fields) if not field.required}
    return {name: value for name, value in given.items() if name not in defaults or value != defaults[name]}
