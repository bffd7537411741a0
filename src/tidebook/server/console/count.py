"""Counts that stop at a bound, so that no page counts all of a large queue or outbox."""

from __future__ import annotations

from typing import Final

import msgspec

#: Counts above this are estimates.
EXACT_MAX: Final = 10_000


class Count(msgspec.Struct, frozen=True):
    """A number of things; above `EXACT_MAX` it is an estimate, and says so."""

    value: int
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.value:,}" if self.exact else f"over {self.value:,}"
