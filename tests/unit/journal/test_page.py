"""Which pages need no look at the head after them."""

from __future__ import annotations

import pytest

from tidebook.core.errors import Corrupt
from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow
from tidebook.journal.page import EventPageOfStore

#: A life from offset 10 to 20 of epoch 2.
HEAD = Head(True, 9, 0, Position(2, 10), Position(2, 20), 100, None, 0, (), None, ())


def row(number: int, offset: int, epoch: int = 2) -> EventRow:
    return EventRow(number, b"", 0, Position(epoch, offset), 0)


def page(*rows: EventRow) -> EventPageOfStore:
    return EventPageOfStore(rows, after=3, to=9)


def test_a_row_of_the_incarnation_for_every_number_is_gap_free() -> None:
    assert page(row(4, 10), row(5, 12), row(6, 20)).is_gap_free(HEAD)


@pytest.mark.parametrize(
    "rows",
    [
        (row(5, 12), row(6, 13)),
        (row(4, 11), row(6, 13)),
        (),
    ],
)
def test_a_missing_number_is_none(rows: tuple[EventRow, ...]) -> None:
    assert not page(*rows).is_gap_free(HEAD)


@pytest.mark.parametrize("other", [row(5, 9), row(5, 21), row(5, 12, epoch=1), row(5, 12, epoch=3)])
def test_a_row_of_another_incarnation_is_not_gap_free_and_raises(other: EventRow) -> None:
    mixed = page(row(4, 10), other, row(6, 20))
    assert not mixed.is_gap_free(HEAD)
    with pytest.raises(Corrupt, match="event 5"):
        mixed.check(HEAD)


def test_what_is_covered_ends_with_the_last_row_or_where_nothing_was_found() -> None:
    assert page(row(4, 10), row(6, 12)).reached == 6
    assert page().reached == 9
