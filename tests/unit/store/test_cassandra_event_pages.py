"""How many events a page asks for: by what its journal held, and fewer where they do not come in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("acsylla")

from acsylla import errors

from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, PutEvents
from tidebook.store.cassandra.mutations import event_batches
from tidebook.store.cassandra.page_size import PAGE_BYTES, PAGE_ROWS_MIN
from tidebook.store.cassandra.rows import encode_row
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
        return Rows([Row(encode_row(event(after + 1 + i, BYTES[id]))) for i in range(rows)])


class Table:
    """A session over the rows of one journal, in segments of ten."""

    def __init__(self, rows: Sequence[EventRow]) -> None:
        head = msgspec.structs.replace(HEAD, segment_size=10)
        written = [each for batch in event_batches(PutEvents(SMALL, head, tuple(rows))) for each in batch]
        self.cells = {(each.values[2], each.values[3]): each.values[4] for each in written}
        self.asked: list[int] = []

    async def read(self, _: str, values: Sequence[Any], *, page_size: int) -> Rows:
        _, _, segment, after, to, limit = values
        self.asked.append(limit)
        keys = sorted(key for key in self.cells if key[0] == segment and after < key[1] <= to)
        return Rows([Row(self.cells[key]) for key in keys[:limit]])


def event(seq_nr: int, size: int) -> EventRow:
    return EventRow(seq_nr, b"x" * size, 5, Position(1, seq_nr), 0)


def appended(counts: Sequence[int], *, gaps: Sequence[int] = ()) -> list[EventRow]:
    """The events of appends, each of so many, and behind each a gap."""
    rows: list[EventRow] = []
    seq_nr = 1
    for at, (count, gap) in enumerate(zip(counts, [*gaps, *[0] * len(counts)], strict=False)):
        position = Position(1, at)
        rows += (EventRow(seq_nr + i, b"%d" % i, 5, position, i, 6) for i in range(count))
        seq_nr += count + gap
    return rows


HEAD = Head(True, 5000, 0, Position(1, 0), Position(1, 9), 10_000, None, 0, (), None, ())


async def page(pages: EventPages, key: Key) -> list[EventRow]:
    return await pages.read(key, HEAD, after=0, to=5000, limit=1000)


async def test_a_page_that_is_too_large_for_its_time_comes_in_a_smaller_part() -> None:
    pages = EventPages(node := Node())  # type: ignore[arg-type]
    for _ in range(2):
        await page(pages, SMALL)
    assert len(await page(pages, SMALL)) == 1000
    assert len(await page(pages, LARGE)) == PAGE_ROWS_MIN
    assert len(await page(pages, LARGE)) * BYTES["large"] <= PAGE_BYTES
    assert [asked for id, asked in node.asked if id == "large"][:2] == [1000, PAGE_ROWS_MIN]


async def test_a_journal_of_large_events_makes_the_pages_of_others_no_smaller() -> None:
    pages = EventPages(Node())  # type: ignore[arg-type]
    for key in (SMALL, LARGE, LARGE):
        await page(pages, key)
    assert len(await page(pages, SMALL)) == 1000


async def test_a_node_that_sends_nothing_is_asked_twice_and_no_more() -> None:
    pages = EventPages(node := Node(in_time_bytes=0))  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await page(pages, SMALL)
    assert len(node.asked) == 2
    with pytest.raises(Unavailable):
        await page(pages, SMALL)
    assert len(node.asked) <= 4


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(0, 25), max_size=8),
    st.integers(1, 60),
    st.data(),
)
async def test_pages_over_shared_rows_hold_every_event_once(
    counts: list[int], gaps: list[int], limit: int, data: st.DataObject
) -> None:
    rows = appended(counts, gaps=gaps)
    last = rows[-1].seq_nr
    head = msgspec.structs.replace(HEAD, segment_size=10, seq_nr=last)
    after = data.draw(st.integers(0, last))
    to = data.draw(st.integers(after, last))
    pages = EventPages(Table(rows))  # type: ignore[arg-type]
    wanted = [row for row in rows if after < row.seq_nr <= to]
    found: list[EventRow] = []
    while some := await pages.read(SMALL, head, after=after, to=to, limit=limit):
        assert len(some) <= limit
        found += some
        after = some[-1].seq_nr
    assert found == wanted


async def test_where_events_share_rows_fewer_rows_are_asked_for() -> None:
    rows = appended([10] * 100)
    table = Table(rows)
    pages = EventPages(table)  # type: ignore[arg-type]
    head = msgspec.structs.replace(HEAD, segment_size=10, seq_nr=1000)
    await pages.read(SMALL, head, after=0, to=1000, limit=50)
    assert len(await pages.read(SMALL, head, after=10, to=1000, limit=50)) <= 50
    assert table.asked[-1] == 6
    # A part that has as many numbers as events are wanted comes whole, however its rows lie.
    assert [row.seq_nr for row in await pages.read(SMALL, head, after=13, to=18, limit=5)] == [14, 15, 16, 17, 18]
