"""The values that reads and writes of a region return."""

from __future__ import annotations

from typing import Any

import msgspec


class WalEntry(msgspec.Struct, frozen=True, gc=False):
    """One payload of a table, with its sequence number and the offset of its record."""

    table: int
    seq: int
    payload: Any
    offset: int


class Written(msgspec.Struct, frozen=True, gc=False):
    """The result of a write: the first and last sequence number, and the offset of the record."""

    first: int
    last: int
    offset: int
