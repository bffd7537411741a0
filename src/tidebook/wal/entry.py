"""What a region gives back."""

from __future__ import annotations

from typing import Any

import msgspec


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One payload of a table, with its place."""

    table: int
    seq: int
    payload: Any
    offset: int


class Written(msgspec.Struct, frozen=True, gc=False):
    """The payloads have these numbers, and their record lies at this offset."""

    first: int
    last: int
    offset: int
