"""What an appender learns."""

from __future__ import annotations

import msgspec
import pytest

from tidebook.core.action import Append
from tidebook.core.errors import Conflict, Fenced, InvalidInput, OutcomeUnknown
from tidebook.core.fold import Appended as Added
from tidebook.core.fold import Crowded, Forgotten, Lost, Repeated, Stale
from tidebook.core.head import JOURNAL_TAGS_MAX, Head, Recent
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.journal.append import floor_of
from tidebook.journal.outcome import Appended, answer, answer_from_head

KEY = Key("orders", "o-1")
ID = b"i" * 16
ACTION = Append(1, ID, 1, b"\x91\x00", expected=4)
AT = Position(1, 30)


def head(*recent: Recent, evicted: Position | None = None, live: bool = True) -> Head:
    return Head(live, 9, 0, Position(1, 0), Position(1, 40), 5, None, 0, recent, evicted, ())


def test_what_was_added_is_told_with_its_own_offset() -> None:
    assert answer(Added(5, 6, 4), "orders", "o-1", ACTION, 2, AT) == Appended(5, 6, 2, 30)


def test_what_was_repeated_is_told_with_the_first_ones_offset() -> None:
    assert answer(Repeated(5, 6, Position(1, 7)), "orders", "o-1", ACTION, 2, AT) == Appended(5, 6, 2, 7)


def test_a_lost_append_is_a_conflict() -> None:
    told = answer(Lost(9), "orders", "o-1", ACTION, 2, AT)
    assert isinstance(told, Conflict)
    assert (told.key, told.expected, told.at, told.found) == (KEY, 4, None, 9)


def test_an_append_for_another_epoch_is_fenced() -> None:
    assert isinstance(answer(Stale(), "orders", "o-1", ACTION, 2, AT), Fenced)


def test_a_forgotten_retry_stays_unknown() -> None:
    told = answer(Forgotten(), "orders", "o-1", ACTION, 2, AT)
    assert isinstance(told, OutcomeUnknown)
    assert told.append_id == ID


def test_an_append_with_too_many_different_tags_is_refused() -> None:
    told = answer(Crowded(), "orders", "o-1", ACTION, 2, AT)
    assert isinstance(told, InvalidInput)
    assert "10,000 different tags" in str(told)


# ---- replicated before it could be folded


def test_a_head_that_knows_the_id_tells_its_numbers() -> None:
    known = head(Recent(ID, 5, 6, AT))
    assert answer_from_head(known, KEY, ACTION, 2, AT) == Appended(5, 6, 2, 30)


@pytest.mark.parametrize("evicted", [None, Position(1, 29)])
def test_a_head_that_would_still_know_the_id_tells_that_it_was_void(evicted: Position | None) -> None:
    told = answer_from_head(head(evicted=evicted), KEY, ACTION, 2, AT)
    assert isinstance(told, Conflict)
    assert told.found == 9


def test_no_head_at_all_tells_that_it_was_void() -> None:
    told = answer_from_head(None, KEY, ACTION, 2, AT)
    assert isinstance(told, Conflict)
    assert told.found == 0


def test_a_grave_tells_that_it_was_void_and_that_there_is_nothing() -> None:
    told = answer_from_head(head(live=False), KEY, ACTION, 2, AT)
    assert isinstance(told, Conflict)
    assert told.found == 0


def test_a_head_that_may_have_forgotten_the_id_tells_nothing() -> None:
    assert isinstance(answer_from_head(head(evicted=AT), KEY, ACTION, 2, AT), OutcomeUnknown)


def test_a_retry_whose_first_attempt_may_be_forgotten_is_no_conflict() -> None:
    retry = Append(1, ID, 1, b"\x91\x00", expected=4, floor=10)
    assert isinstance(answer_from_head(head(evicted=Position(1, 12)), KEY, retry, 2, AT), OutcomeUnknown)
    assert isinstance(answer_from_head(head(evicted=Position(1, 9)), KEY, retry, 2, AT), Conflict)


# ---- floors


def test_the_floor_of_a_retry_is_that_of_its_first_attempt() -> None:
    assert floor_of(OutcomeUnknown("x", append_id=ID, floor=7, epoch=1), 1) == 7
    assert floor_of(OutcomeUnknown("x", append_id=ID, floor=0, epoch=1), 1) == 0


@pytest.mark.parametrize(("floor", "epoch"), [(7, 1), (None, 2), (7, None)])
def test_a_floor_of_another_epoch_says_nothing(floor: int | None, epoch: int | None) -> None:
    assert floor_of(OutcomeUnknown("x", append_id=ID, floor=floor, epoch=epoch), 2) == -1


def test_a_head_that_has_all_the_tags_it_can_count_tells_why_an_append_was_void() -> None:
    full = msgspec.structs.replace(head(), tag_counts={f"t-{n}": 1 for n in range(JOURNAL_TAGS_MAX)})
    action = msgspec.structs.replace(ACTION, tagged=(("one-more", 1),))
    assert isinstance(answer_from_head(full, KEY, action, 2, AT), InvalidInput)
