"""How many events a page asks for: by what its journal held, and fewer where they do not come in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("acsylla")

from acsylla import errors

from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.store.cassandra.page_size import PAGE_BYTES, PAGE_ROWS_MIN
from tidebook.store.cassandra.scan import EventPages

LARGE, SMALL = Key("t", "large"), Key("t", "small")
BYTES = {"large": 500_000, "small": 200}


class Row:
    def __init__(self, cell: bytes) -> None:
        self._cell = cell

    def column_value_by_index(self, _: int) -> bytes:
        return self._cell


class Rows(list[Row]):
    """As the driver gives them."""

    def all(self) -> list[Row]:
        return self


class Node:
    """A session whose node sends no more than so many bytes in time."""

    def __init__(self, in_time_bytes: float = 20_000_000) -> None:
        self.in_time_bytes = in_time_bytes
        self.asked: list[tuple[str, int]] = []

    async def read(self, _: str, values: Sequence[Any], *, page_size: int) -> Rows:
        id, after, to = values[0], values[3], values[4]
        self.asked.append((id, page_size))
        rows = min(page_size, to - after)
        if rows * BYTES[id] > self.in_time_bytes:
            raise Unavailable("too late") from errors.CassErrorLibRequestTimedOut("too late")
        return Rows([Row(b"x" * BYTES[id])] * rows)


HEAD = Head(True, 5000, 0, Position(1, 0), Position(1, 9), 10_000, None, 0, (), None, ())


async def cells(pages: EventPages, key: Key) -> list[bytes]:
    return await pages._cells(key, HEAD, 0, 5000, 1000)


async def test_a_page_that_is_too_large_for_its_time_comes_in_a_smaller_part() -> None:
    pages = EventPages(node := Node())  # type: ignore[arg-type]
    for _ in range(2):
        await cells(pages, SMALL)
    assert len(await cells(pages, SMALL)) == 1000
    assert len(await cells(pages, LARGE)) == PAGE_ROWS_MIN
    assert len(await cells(pages, LARGE)) * BYTES["large"] <= PAGE_BYTES
    assert [asked for id, asked in node.asked if id == "large"][:2] == [1000, PAGE_ROWS_MIN]


async def test_a_journal_of_large_events_makes_the_pages_of_others_no_smaller() -> None:
    pages = EventPages(Node())  # type: ignore[arg-type]
    for key in (SMALL, LARGE, LARGE):
        await cells(pages, key)
    assert len(await cells(pages, SMALL)) == 1000


async def test_a_node_that_sends_nothing_is_asked_twice_and_no_more() -> None:
    pages = EventPages(node := Node(in_time_bytes=0))  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await cells(pages, SMALL)
    assert len(node.asked) == 2
    with pytest.raises(Unavailable):
        await cells(pages, SMALL)
    assert len(node.asked) <= 4
