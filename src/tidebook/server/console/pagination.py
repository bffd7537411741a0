"""Numbered pages of a list whose length is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from msgspec import Meta

T = TypeVar("T")

#: The number of a page, as the address has it.
PageNumber = Annotated[int, Meta(ge=1, le=100_000)]


def paginate(items: Sequence[T], number: int, *, rows_max: int) -> tuple[Sequence[T], int, int]:
    """Return the items of a page, its number, and how many pages there are; beyond the last page, return that one."""
    pages = max(1, -(-len(items) // rows_max))
    number = min(number, pages)
    return items[(number - 1) * rows_max : number * rows_max], number, pages
