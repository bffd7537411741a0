"""The decisions of a read: where events come from, whether a page is valid, whether a read may continue."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.seq_nr import LAST
from tidebook.journal.plan import (
    Nothing,
    ReadPlan,
    StoreOnly,
    StoreThenTail,
    TailOnly,
    may_continue,
    page_is_valid,
    plan_read,
)

LIFE = Position(1, 3)


def head(seq_nr: int = 9, delete_to: int = 0, *, live: bool = True, life: Position = LIFE) -> Head:
    return Head(live, seq_nr, delete_to, life, Position(1, 20), 5, None, 0, (), None, ())


def plan(stored: Head | None, folded: Head | None, **how: Any) -> ReadPlan:
    return plan_read(
        stored=stored, folded=folded, **{"purged": False, "appended": False, "after": 0, "to": LAST, **how}
    )


@pytest.mark.parametrize("folded", [None, head(live=False)], ids=["none", "grave"])
@pytest.mark.parametrize("stored", [None, head(), head(live=False)], ids=["none", "head", "grave"])
def test_where_there_is_no_journal_there_is_nothing(stored: Head | None, folded: Head | None) -> None:
    assert plan(stored, folded) == Nothing()


def test_where_all_is_deleted_there_is_nothing() -> None:
    assert plan(head(9, 9), head(9, 9)) == Nothing()


@pytest.mark.parametrize(("after", "to"), [(9, LAST), (5, 5), (5, 3)])
def test_an_empty_range_is_nothing(after: int, to: int) -> None:
    assert plan(head(), head(), after=after, to=to) == Nothing()


def test_without_a_tail_the_store_has_it_all() -> None:
    assert plan(head(), head()) == StoreOnly(0, 9)


def test_a_range_that_the_store_has_needs_no_tail() -> None:
    assert plan(head(9), head(12), appended=True, to=9) == StoreOnly(0, 9)


def test_a_tail_comes_after_the_stores_rows() -> None:
    assert plan(head(9), head(12), appended=True) == StoreThenTail(0, 9)


def test_the_tails_deletes_bound_the_stores_rows() -> None:
    assert plan(head(9), head(12, 4), appended=True) == StoreThenTail(4, 9)


def test_a_range_after_the_stores_rows_is_read_from_the_tail_alone() -> None:
    assert plan(head(9), head(12), appended=True, after=9) == TailOnly(9)


def test_a_delete_in_the_tail_of_all_the_store_has_leaves_the_tail_alone() -> None:
    assert plan(head(9), head(12, 10), appended=True) == TailOnly(10)


@pytest.mark.parametrize("stored", [None, head(live=False)], ids=["none", "grave"])
def test_without_a_stored_journal_the_tail_is_alone(stored: Head | None) -> None:
    assert plan(stored, head(3), appended=True) == TailOnly(0)


def test_a_purge_in_the_tail_leaves_the_tail_alone() -> None:
    assert plan(head(9), head(3, life=Position(1, 30)), purged=True, appended=True) == TailOnly(0)


# ---- rule 19


def test_a_page_is_valid_while_its_journal_is_live() -> None:
    assert page_is_valid(head(), head(12), 4)


@pytest.mark.parametrize(("delete_to", "stands"), [(3, True), (4, True), (5, False)])
def test_a_page_is_valid_if_nothing_after_its_cursor_is_deleted(delete_to: int, stands: bool) -> None:
    assert page_is_valid(head(), head(9, delete_to), 4) is stands


@pytest.mark.parametrize(
    "now", [None, head(live=False), head(life=Position(1, 30)), head(life=Position(2, 3))], ids=repr
)
def test_a_page_of_a_purged_journal_is_not_valid(now: Head | None) -> None:
    assert not page_is_valid(head(), now, 4)


@pytest.mark.parametrize(
    ("folded", "may"),
    [
        (head(), True),
        (head(9, 4), True),
        (head(9, 5), False),
        (head(live=False), False),
        (head(life=Position(1, 30)), False),
        (None, False),
    ],
)
def test_a_read_continues_only_without_a_gap_and_in_the_same_incarnation(folded: Head | None, may: bool) -> None:
    assert may_continue(LIFE, folded, 4) is may


def test_plans_are_values() -> None:
    assert msgspec.structs.astuple(StoreThenTail(1, 2)) == (1, 2)
