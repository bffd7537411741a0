"""The decisions of a read: where events come from, whether a page is valid, whether a read may continue."""

from __future__ import annotations

import msgspec
import pytest

from tidebook.core.errors import Corrupt, Fenced
from tidebook.core.event import Event, encode_event
from tidebook.core.head import Head, RecentAppend
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import EventRow, Pointer
from tidebook.core.seq_nr import LAST
from tidebook.journal.view import (
    ReadPlan,
    ReadView,
    ViewBase,
    check_rows,
    choose_base,
    is_gap_free,
    may_continue,
    page_is_valid,
    plan_read,
    read_events,
    stored_base,
)
from tidebook.log.port import Record
from tidebook.testing.action_histories import append, placed_at
from tidebook.testing.conformance.journal_records import topic_config

INCARNATION = Position(1, 3)


def head(seq_nr: int = 9, delete_to: int = 0, *, live: bool = True, incarnation: Position = INCARNATION) -> Head:
    return Head(live, seq_nr, delete_to, incarnation, Position(1, 20), 5, None, 0, (), None, ())


def plan(stored: Head | None, folded: Head | None, *, after: int = 0, to: int = LAST) -> ReadPlan | None:
    return plan_read(stored=stored, folded=folded, after=after, to=to)


@pytest.mark.parametrize("folded", [None, head(live=False)], ids=["none", "grave"])
@pytest.mark.parametrize("stored", [None, head(), head(live=False)], ids=["none", "head", "grave"])
def test_a_missing_journal_has_no_events(stored: Head | None, folded: Head | None) -> None:
    assert plan(stored, folded) is None


def test_a_journal_whose_events_are_all_deleted_has_none() -> None:
    assert plan(head(9, 9), head(9, 9)) is None


@pytest.mark.parametrize(("after", "to"), [(9, LAST), (5, 5), (5, 3)])
def test_an_empty_range_has_no_events(after: int, to: int) -> None:
    assert plan(head(), head(), after=after, to=to) is None


def test_without_a_tail_all_events_come_from_the_store() -> None:
    assert plan(head(), head()) == ReadPlan(0, 9, 9)


def test_a_range_within_the_store_needs_no_tail() -> None:
    assert plan(head(9), head(12), to=9) == ReadPlan(0, 9, 9)


def test_the_tail_is_read_after_the_rows_of_the_store() -> None:
    assert plan(head(9), head(12)) == ReadPlan(0, 9, 12)


def test_deletes_in_the_tail_bound_the_rows_of_the_store() -> None:
    assert plan(head(9), head(12, 4)) == ReadPlan(4, 9, 12)


def test_a_range_after_the_rows_of_the_store_is_read_only_from_the_tail() -> None:
    assert plan(head(9), head(12), after=9) == ReadPlan(9, 9, 12)


def test_after_a_delete_of_everything_in_the_store_only_the_tail_is_read() -> None:
    assert plan(head(9), head(12, 10)) == ReadPlan(10, 10, 12)


@pytest.mark.parametrize("stored", [None, head(live=False)], ids=["none", "grave"])
def test_without_a_stored_journal_only_the_tail_is_read(stored: Head | None) -> None:
    assert plan(stored, head(3)) == ReadPlan(0, 0, 3)


def test_after_a_purge_in_the_tail_only_the_tail_is_read() -> None:
    assert plan(None, head(3, incarnation=Position(1, 30))) == ReadPlan(0, 0, 3)


# ---- whether a page is valid, and whether a read may continue (rule 19)


def test_a_page_is_valid_while_its_journal_is_live() -> None:
    assert page_is_valid(head(), head(12), 4)


@pytest.mark.parametrize(("delete_to", "valid"), [(3, True), (4, True), (5, False)])
def test_a_page_is_valid_if_nothing_after_its_cursor_is_deleted(delete_to: int, valid: bool) -> None:
    assert page_is_valid(head(), head(9, delete_to), 4) is valid


@pytest.mark.parametrize(
    "now", [None, head(live=False), head(incarnation=Position(1, 30)), head(incarnation=Position(2, 3))], ids=repr
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
        (head(incarnation=Position(1, 30)), False),
        (None, False),
    ],
)
def test_a_read_continues_only_without_a_gap_and_in_the_same_incarnation(folded: Head | None, may: bool) -> None:
    assert may_continue(INCARNATION, folded, 4) is may


# ---- the base of a view

EPOCH = 1
AT = 25
POINTER = Pointer(Position(EPOCH, 20), 0)


def chosen(
    cached: Head | None, *, stored: ViewBase | None = None, pointer: Pointer | None = POINTER, tail_start: int = 0
) -> ViewBase | None:
    return choose_base(stored=stored, cached=ViewBase(cached, AT), pointer=pointer, tail_start=tail_start, epoch=EPOCH)


def test_the_head_that_the_store_returned_is_the_base() -> None:
    stored = ViewBase(head(5), 12)
    assert chosen(head(), stored=stored) is stored
    assert choose_base(stored=stored, cached=None, pointer=None, tail_start=0, epoch=EPOCH) is stored


def test_without_an_answer_and_without_a_cached_head_there_is_no_base() -> None:
    assert choose_base(stored=None, cached=None, pointer=POINTER, tail_start=0, epoch=EPOCH) is None


def test_a_cached_head_that_is_completely_replicated_is_the_base() -> None:
    assert chosen(head()) == ViewBase(head(), AT)


@pytest.mark.parametrize("cached", [None, head(live=False)], ids=["none", "grave"])
def test_a_cached_head_without_a_live_journal_is_not_the_base(cached: Head | None) -> None:
    assert chosen(cached) is None


def test_a_cached_head_that_is_only_partly_replicated_is_no_base() -> None:
    assert chosen(head(), pointer=Pointer(Position(EPOCH, 19), 0)) is None


def test_without_the_store_the_view_starts_before_the_incarnation() -> None:
    before, within = (RecentAppend(b"", 1, 1, Position(EPOCH, offset)) for offset in (2, 4))
    known = msgspec.structs.replace(head(), recent=(before, within))
    base = chosen(known, pointer=None, tail_start=3)
    assert base is not None
    assert base.head is not None
    assert (base.head.live, base.head.recent, base.as_of) == (False, (before,), 2)


def test_without_the_store_a_journal_that_does_not_exist_is_known_as_of_the_tail() -> None:
    assert chosen(None, pointer=None) == ViewBase(None, AT)


@pytest.mark.parametrize("cached", [head(), head(incarnation=Position(0, 30))], ids=["before the tail", "older epoch"])
def test_without_the_store_and_the_start_of_the_incarnation_there_is_no_base(cached: Head) -> None:
    assert chosen(cached, pointer=None, tail_start=4) is None


@pytest.mark.parametrize(
    ("pointer", "stored", "as_of"),
    [(None, None, -1), (20, None, 20), (None, 20, 20), (15, 20, 20), (30, 20, 30)],
)
def test_the_store_is_known_through_the_later_of_pointer_and_head(
    pointer: int | None, stored: int | None, as_of: int
) -> None:
    read = None if pointer is None else Pointer(Position(EPOCH, pointer), 0)
    found = None if stored is None else head()
    assert stored_base(read, found, "orders", 0, topic_config("orders")).as_of == as_of
    later = msgspec.structs.replace(topic_config("orders"), epoch=EPOCH + 1)
    assert stored_base(read, found, "orders", 0, later).as_of == -1


def test_a_store_of_a_newer_epoch_is_fenced() -> None:
    with pytest.raises(Fenced, match="replicated in epoch 2"):
        stored_base(Pointer(Position(2, 0), 0), None, "orders", 0, topic_config("orders"))


# ---- pages

#: An incarnation from offset 10 to 20 of epoch 2.
HEAD = Head(True, 9, 0, Position(2, 10), Position(2, 20), 100, None, 0, (), None, ())


def row(number: int, offset: int, epoch: int = 2) -> EventRow:
    return EventRow(number, b"", 0, Position(epoch, offset), 0)


def test_a_row_of_the_incarnation_for_every_number_is_gap_free() -> None:
    assert is_gap_free((row(4, 10), row(5, 12), row(6, 20)), 3, HEAD)


@pytest.mark.parametrize(
    "rows",
    [
        (row(5, 12), row(6, 13)),
        (row(4, 11), row(6, 13)),
        (),
    ],
)
def test_a_missing_number_is_none(rows: tuple[EventRow, ...]) -> None:
    assert not is_gap_free(rows, 3, HEAD)


@pytest.mark.parametrize("other", [row(5, 9), row(5, 21), row(5, 12, epoch=1), row(5, 12, epoch=3)])
def test_a_row_of_another_incarnation_is_not_gap_free_and_raises(other: EventRow) -> None:
    mixed = (row(4, 10), other, row(6, 20))
    assert not is_gap_free(mixed, 3, HEAD)
    with pytest.raises(Corrupt, match="event 5"):
        check_rows(mixed, HEAD)


def test_events_are_read_with_their_tags_metadata_and_place() -> None:
    events = [Event(b"bytes", tags={"paid", "new"}), Event({"n": 1}, metadata={"by": "me"}), Event("text")]
    rows = [EventRow(4 + n, encode_event(event), 77, Position(2, 9), n) for n, event in enumerate(events)]
    found = read_events(rows, 3)
    assert [(each.seq_nr, each.payload) for each in found] == [(4, b"bytes"), (5, {"n": 1}), (6, "text")]
    assert [each.tags for each in found] == [frozenset({"paid", "new"}), frozenset(), frozenset()]
    assert [each.metadata for each in found] == [None, {"by": "me"}, None]
    assert {(each.timestamp_ms, each.partition, each.offset) for each in found} == {(77, 3, 9)}
    with pytest.raises(Corrupt, match="damaged"):
        read_events([EventRow(1, b"\xc1", 77, Position(2, 9), 0)], 3)


@pytest.mark.parametrize(("evicted", "left"), [(None, None), (2, 2), (3, None), (9, None)])
def test_without_the_store_a_view_starts_with_the_appends_evicted_before_its_incarnation(
    evicted: int | None, left: int | None
) -> None:
    given = None if evicted is None else Position(1, evicted)
    cached = ViewBase(msgspec.structs.replace(head(), evicted=given), 20)
    base = choose_base(stored=None, cached=cached, pointer=None, tail_start=0, epoch=1)
    assert base is not None
    assert base.head is not None
    assert base.head.evicted == (None if left is None else Position(1, left))


def test_a_tail_of_exactly_the_maximum_of_bytes_is_kept() -> None:
    action = placed_at(append(2), 0)
    record = Record(0, 5, b"a", encode_record(action, limit_bytes=10**6))
    for bytes_max, is_kept in ((len(action.body) - 1, False), (len(action.body), True)):
        view = ReadView(ViewBase(None, -1), topic_config("t"), bytes_max=bytes_max)
        view.take(record)
        assert (view.appends is not None) is is_kept
