"""A scan of all events returns each event once, however rows are packed and wherever pages end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("acsylla")

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, PutEvents
from tidebook.store.cassandra import scan as sizes
from tidebook.store.cassandra.mutations import event_batches
from tidebook.store.cassandra.token_ranges import events_in
from tidebook.store.port import ScanSplit

HEAD = Head(True, 5000, 0, Position(1, 0), Position(1, 9), 10_000, None, 0, (), None, ())


class Row:
    def __init__(self, id: str, cell: bytes) -> None:
        self._both = id, cell

    def as_tuple(self) -> tuple[str, bytes]:
        return self._both


class Page(list[Row]):
    def __init__(self, rows: Sequence[Row], next_at: int | None) -> None:
        super().__init__(rows)
        self._next_at = next_at

    def has_more_pages(self) -> bool:
        return self._next_at is not None

    def page_state(self) -> int | None:
        return self._next_at


class Table:
    """A session over rows in their order."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    async def read(self, *_: Any, page_size: int, page_state: int | None) -> Page:
        start = page_state or 0
        stop = start + page_size
        return Page(self._rows[start:stop], stop if stop < len(self._rows) else None)


def cells(id: str, events: Sequence[EventRow], *, packed: bool) -> dict[int, bytes]:
    batches = event_batches(PutEvents(Key("t", id), HEAD, tuple(events)), packed=packed)
    return {each.values[3]: each.values[4] for batch in batches for each in batch}


@pytest.mark.parametrize("page_rows", range(1, 24))
async def test_events_in_both_a_single_and_a_packed_row_are_returned_once_wherever_a_page_ends(
    monkeypatch: pytest.MonkeyPatch, page_rows: int
) -> None:
    """A repair died before it removed the packed row, or a slice of an older version was replicated again."""
    monkeypatch.setattr(sizes.PageSizes, "rows", lambda *_: page_rows)
    position = Position(1, 0)  # one object, by which the events of one record are recognized
    events = [EventRow(1 + i, b"%d" % i, 5, position, i, 6) for i in range(20)]
    assert sorted(cells("a", events, packed=True)) == [16, 20]
    rows: list[Row] = []
    for id in ("a", "b"):
        both = cells(id, events, packed=False) | cells(id, events, packed=True)
        rows += (Row(id, both[number]) for number in sorted(both))
    pages = events_in(Table(rows), "t", ScanSplit("0", "1"))  # type: ignore[arg-type]
    found = [each async for page in pages for each in page]
    assert found == [(id, event) for id in ("a", "b") for event in events]
