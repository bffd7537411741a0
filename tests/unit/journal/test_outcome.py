"""The outcome of an append, as its caller receives it."""

from __future__ import annotations

import msgspec
import pytest

from tidebook.core.action import Append
from tidebook.core.errors import Conflict, Fenced, InvalidInput, OutcomeUnknown
from tidebook.core.fold import AppendApplied as Added
from tidebook.core.fold import AppendRepeated, Rejected, RetryTooLate, Stale, TooManyTags
from tidebook.core.head import JOURNAL_TAGS_MAX, Head, RecentAppend
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.journal.append import retry_floor
from tidebook.journal.outcome import Appended, outcome_from_head, outcome_of

KEY = Key("orders", "o-1")
ID = b"i" * 16
ACTION = Append(1, ID, 1, b"\x91\x00", expected=4)
AT = Position(1, 30)


def head(*recent: RecentAppend, evicted: Position | None = None, live: bool = True) -> Head:
    return Head(live, 9, 0, Position(1, 0), Position(1, 40), 5, None, 0, recent, evicted, ())


def test_an_applied_append_has_its_own_offset() -> None:
    assert outcome_of(Added(5, 6, 4), "orders", "o-1", ACTION, 2, AT) == Appended(5, 6, 2, 30)


def test_a_repeated_append_has_the_offset_of_the_first_attempt() -> None:
    assert outcome_of(AppendRepeated(5, 6, Position(1, 7)), "orders", "o-1", ACTION, 2, AT) == Appended(
        5, 6, 2, 7, repeated=True
    )


def test_a_rejected_append_is_a_conflict() -> None:
    reported = outcome_of(Rejected(9), "orders", "o-1", ACTION, 2, AT)
    assert isinstance(reported, Conflict)
    assert (reported.key, reported.expected, reported.at, reported.found) == (KEY, 4, None, 9)


def test_the_expected_number_in_another_incarnation_is_not_reported_as_found() -> None:
    """Expected 4 and found 4 would be no conflict: the number found is that of another journal of this id."""
    reported = outcome_of(Rejected(4), "orders", "o-1", ACTION, 2, AT)
    assert isinstance(reported, Conflict)
    assert (reported.expected, reported.found) == (4, None)


def test_an_append_for_another_epoch_is_fenced() -> None:
    assert isinstance(outcome_of(Stale(), "orders", "o-1", ACTION, 2, AT), Fenced)


def test_the_outcome_of_a_late_retry_stays_unknown() -> None:
    reported = outcome_of(RetryTooLate(), "orders", "o-1", ACTION, 2, AT)
    assert isinstance(reported, OutcomeUnknown)
    assert reported.append_id == ID


def test_an_append_with_too_many_different_tags_is_refused() -> None:
    reported = outcome_of(TooManyTags(), "orders", "o-1", ACTION, 2, AT)
    assert isinstance(reported, InvalidInput)
    assert "10,000 different tags" in str(reported)


# ---- appends that were replicated before they could be folded


def test_a_head_with_the_append_id_gives_its_numbers() -> None:
    known = head(RecentAppend(ID, 5, 6, AT))
    assert outcome_from_head(known, KEY, ACTION, 2, AT) == Appended(5, 6, 2, 30)


@pytest.mark.parametrize("evicted", [None, Position(1, 29)])
def test_a_head_that_would_still_have_the_id_shows_that_the_append_was_void(evicted: Position | None) -> None:
    assert isinstance(outcome_from_head(head(evicted=evicted), KEY, ACTION, 2, AT), Conflict)


def found(head: Head | None, action: Append = ACTION) -> int | None:
    outcome = outcome_from_head(head, KEY, action, 2, AT)
    assert isinstance(outcome, Conflict)
    return outcome.found


def test_a_head_that_has_not_changed_after_the_append_gives_the_number_found() -> None:
    before = msgspec.structs.replace(head(), position=Position(1, 29))
    assert found(before) == 9
    assert found(msgspec.structs.replace(before, live=False)) == 0


OTHERS = (RecentAppend(b"1" * 16, 5, 7, Position(1, 20)), RecentAppend(b"2" * 16, 8, 9, Position(1, 40)))


@pytest.mark.parametrize("live", [True, False], ids=["live", "purged since"])
def test_a_later_head_gives_the_number_of_the_last_append_before(live: bool) -> None:
    assert found(head(*OTHERS, live=live)) == 7
    assert found(head(OTHERS[0], live=live)) == 7


@pytest.mark.parametrize("live", [True, False], ids=["live", "purged since"])
def test_a_later_head_without_an_earlier_append_leaves_the_number_unset(live: bool) -> None:
    assert found(head(OTHERS[1], live=live)) is None
    assert found(head(live=live)) is None


def test_a_head_of_a_later_incarnation_leaves_the_number_unset() -> None:
    assert found(msgspec.structs.replace(head(*OTHERS), incarnation=Position(1, 35))) is None
    older = msgspec.structs.replace(head(*OTHERS), incarnation=Position(1, 25))
    assert found(older) is None, "the previous append was in an earlier incarnation"


def test_no_head_leaves_the_number_unset_where_none_was_expected() -> None:
    assert found(None, Append(1, ID, 1, b"\x91\x00", expected=0)) is None


def test_an_unset_number_is_not_in_the_message() -> None:
    text = str(outcome_from_head(head(), KEY, Append(1, ID, 1, b"\x91\x00", expected=0), 2, AT))
    assert "expected seq_nr 0" in text
    assert "None" not in text
    assert "read the journal" in text


def test_without_a_head_the_append_was_void() -> None:
    reported = outcome_from_head(None, KEY, ACTION, 2, AT)
    assert isinstance(reported, Conflict)
    assert reported.found == 0


def test_a_head_that_may_have_evicted_the_id_leaves_the_outcome_unknown() -> None:
    assert isinstance(outcome_from_head(head(evicted=AT), KEY, ACTION, 2, AT), OutcomeUnknown)


def test_a_retry_whose_first_attempt_may_be_forgotten_is_no_conflict() -> None:
    retry = Append(1, ID, 1, b"\x91\x00", expected=4, floor=10)
    assert isinstance(outcome_from_head(head(evicted=Position(1, 12)), KEY, retry, 2, AT), OutcomeUnknown)
    assert isinstance(outcome_from_head(head(evicted=Position(1, 9)), KEY, retry, 2, AT), Conflict)


# ---- floors


def test_the_floor_of_a_retry_is_that_of_its_first_attempt() -> None:
    assert retry_floor(OutcomeUnknown("x", append_id=ID, floor=7, epoch=1), 1) == 7
    assert retry_floor(OutcomeUnknown("x", append_id=ID, floor=0, epoch=1), 1) == 0


@pytest.mark.parametrize(("floor", "epoch"), [(7, 1), (None, 2), (7, None)])
def test_a_floor_of_another_epoch_decides_nothing(floor: int | None, epoch: int | None) -> None:
    assert retry_floor(OutcomeUnknown("x", append_id=ID, floor=floor, epoch=epoch), 2) == -1


def test_a_void_append_to_a_head_with_the_maximum_of_tags_is_reported_as_too_many_tags() -> None:
    full = msgspec.structs.replace(head(), tag_counts={f"t-{n}": 1 for n in range(JOURNAL_TAGS_MAX)})
    action = msgspec.structs.replace(ACTION, tagged=(("one-more", 1),))
    assert isinstance(outcome_from_head(full, KEY, action, 2, AT), InvalidInput)
