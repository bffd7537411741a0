"""The fold: one test a cell of the table in design.md, and one a rule of identity and position."""

from __future__ import annotations

import msgspec
import pytest

from tidebook.core.action import NEVER, Action, Append, Damaged, Delete, Mark, Purge, Seal
from tidebook.core.fold import (
    Appended,
    Change,
    Crowded,
    Deleted,
    Forgotten,
    Lost,
    Purged,
    Repeated,
    Stale,
    Unchanged,
    fold,
)
from tidebook.core.head import JOURNAL_TAGS_MAX, JUMPS_MAX, RECENT_MAX, Head, Jump
from tidebook.core.position import Position
from tidebook.core.seq_nr import LAST
from tidebook.core.topic import TopicFacts
from tidebook.testing.histories import append, delete, purge

FACTS = TopicFacts(topic_id="t", partitions=1, segment_size=5)
T0 = 1_700_000_000_000


class Journal:
    """A journal under the fold: each action stands at the next offset, a second later."""

    def __init__(self, *actions: Action | Damaged, epoch: int = 1) -> None:
        self.head: Head | None = None
        self.offset = 0
        self.epoch = epoch
        for action in actions:
            self.do(action)

    def do(self, action: Action | Damaged) -> Change:
        if isinstance(action, Append) and not action.append_id:
            action = msgspec.structs.replace(action, append_id=b"%08d%08d" % (self.epoch, self.offset))
        at = Position(self.epoch, self.offset)
        self.head, change = fold(self.head, action, at, T0 + 1000 * self.offset, FACTS)
        self.offset += 1
        return change

    @property
    def standing(self) -> tuple[bool, int, int]:
        assert self.head is not None
        return self.head.live, self.head.seq_nr, self.head.delete_to


# ---- the table: no head


@pytest.mark.parametrize("action", [Mark(1), Seal(1), Damaged("x"), purge(), Purge(1, Position(1, 0))], ids=repr)
def test_on_no_head_a_mark_a_seal_damage_or_a_purge_does_nothing(action: Action | Damaged) -> None:
    journal = Journal()
    assert isinstance(journal.do(action), Unchanged)
    assert journal.head is None


def test_on_no_head_an_append_numbered_next_creates_events_from_1() -> None:
    journal = Journal()
    assert journal.do(append(2)) == Appended(1, 2, 0)
    assert journal.standing == (True, 2, 0)


def test_on_no_head_an_append_that_expects_0_is_valid() -> None:
    assert Journal().do(append(2, expected=0)) == Appended(1, 2, 0)


def test_on_no_head_an_append_that_expects_a_number_is_void() -> None:
    journal = Journal()
    assert journal.do(append(expected=1)) == Lost(0)
    assert journal.head is None


def test_on_no_head_an_append_at_a_number_starts_there() -> None:
    assert Journal().do(append(2, at=3)) == Appended(3, 4, 0)


def test_on_no_head_a_delete_creates_a_reset() -> None:
    journal = Journal()
    assert journal.do(delete(7)) == Deleted(0, 7)
    assert journal.standing == (True, 7, 7)


# ---- the table: a head


@pytest.mark.parametrize("action", [Mark(1), Mark(1, T0), Seal(1), Damaged("x")], ids=repr)
def test_on_a_head_a_mark_a_seal_or_damage_returns_the_very_head(action: Action | Damaged) -> None:
    journal = Journal(append(2))
    before = journal.head
    assert isinstance(journal.do(action), Unchanged)
    assert journal.head is before


def test_on_a_head_an_append_numbered_next_follows_it() -> None:
    assert Journal(append(2)).do(append(3)) == Appended(3, 5, 2)


def test_on_a_head_an_append_that_expects_its_number_follows_it() -> None:
    assert Journal(append(2)).do(append(expected=2)) == Appended(3, 3, 2)


@pytest.mark.parametrize("expected", [0, 1, 3])
def test_on_a_head_an_append_that_expects_another_number_is_void_and_told_the_true_one(expected: int) -> None:
    journal = Journal(append(2))
    before = journal.head
    assert journal.do(append(expected=expected)) == Lost(2)
    assert journal.head is before


def test_on_a_head_an_append_at_a_number_above_it_may_skip_numbers() -> None:
    assert Journal(append(2)).do(append(2, at=5)) == Appended(5, 6, 2)


@pytest.mark.parametrize("at", [1, 2])
def test_on_a_head_an_append_at_a_number_that_is_taken_is_void(at: int) -> None:
    journal = Journal(append(2))
    before = journal.head
    assert journal.do(append(at=at)) == Lost(2)
    assert journal.head is before


def test_on_a_head_a_delete_goes_up_to_its_number() -> None:
    journal = Journal(append(3))
    assert journal.do(delete(2)) == Deleted(0, 2)
    assert journal.standing == (True, 3, 2)


def test_on_a_head_a_delete_never_takes_future_events() -> None:
    journal = Journal(append(3))
    assert journal.do(delete(99)) == Deleted(0, 3)
    assert journal.standing == (True, 3, 3)
    assert journal.do(append()) == Appended(4, 4, 3)


@pytest.mark.parametrize("to", [1, 2])
def test_on_a_head_a_delete_of_what_is_deleted_returns_the_very_head(to: int) -> None:
    journal = Journal(append(3), delete(2))
    before = journal.head
    assert isinstance(journal.do(delete(to)), Unchanged)
    assert journal.head is before


def test_on_a_head_a_purge_leaves_a_grave() -> None:
    journal = Journal(append(3), delete(1))
    assert isinstance(journal.do(purge()), Purged)
    assert journal.standing == (False, 3, 1)


def test_on_a_head_a_purge_at_its_position_leaves_a_grave() -> None:
    assert isinstance(Journal(append(3)).do(Purge(1, Position(1, 0))), Purged)


def test_on_a_head_a_purge_at_another_position_does_nothing() -> None:
    journal = Journal(append(3), append())
    before = journal.head
    assert isinstance(journal.do(Purge(1, Position(1, 0))), Unchanged)
    assert journal.head is before


# ---- the table: a grave is no head


def test_after_a_purge_the_next_append_makes_a_new_life_from_1() -> None:
    journal = Journal(append(3), delete(2), purge())
    assert journal.do(append(2)) == Appended(1, 2, 0)
    assert journal.standing == (True, 2, 0)


def test_after_a_purge_expected_0_is_valid_and_the_old_number_is_void() -> None:
    journal = Journal(append(3), purge())
    assert journal.do(append(expected=3)) == Lost(0)
    assert journal.do(append(expected=0)) == Appended(1, 1, 0)


def test_after_a_purge_a_number_below_the_old_one_may_be_taken() -> None:
    assert Journal(append(3), purge()).do(append(at=2)) == Appended(2, 2, 0)


def test_after_a_purge_another_purge_does_nothing() -> None:
    journal = Journal(append(3), purge())
    before = journal.head
    assert isinstance(journal.do(purge()), Unchanged)
    assert journal.head is before


def test_after_a_purge_a_delete_creates_a_reset() -> None:
    journal = Journal(append(3), purge())
    assert journal.do(delete(2)) == Deleted(0, 2)
    assert journal.standing == (True, 2, 2)


# ---- rule 1: an epoch is part of the identity


@pytest.mark.parametrize("action", [append(epoch=1), delete(1, epoch=1), purge(epoch=1)], ids=repr)
@pytest.mark.parametrize("before", [(), (append(2, epoch=2),)], ids=["no head", "head"])
def test_what_was_written_for_another_epoch_is_void(action: Action, before: tuple[Action, ...]) -> None:
    journal = Journal(*before, epoch=2)
    head = journal.head
    assert isinstance(journal.do(action), Stale)
    assert journal.head is head


def test_a_journal_goes_on_in_the_next_epoch() -> None:
    journal = Journal(append(2))
    journal.epoch, journal.offset = 2, 0
    assert journal.do(append(epoch=2)) == Appended(3, 3, 2)
    assert journal.head is not None
    assert (journal.head.incarnation, journal.head.position) == (Position(1, 0), Position(2, 0))


# ---- rule 3: the number so far is the larger of seq_nr and delete_to


def test_after_a_delete_on_nothing_the_journal_stands_behind_it() -> None:
    journal = Journal(delete(7))
    assert journal.do(append(expected=0)) == Lost(7)
    assert journal.do(append(at=7)) == Lost(7)
    assert journal.do(append(expected=7)) == Appended(8, 8, 7)


def test_after_a_delete_on_nothing_a_number_above_it_may_be_taken() -> None:
    assert Journal(delete(7)).do(append(at=8)) == Appended(8, 8, 7)


def test_a_delete_of_the_life_that_its_sender_saw_is_done() -> None:
    assert Journal(append(3)).do(Delete(1, 2, Position(1, 0))) == Deleted(0, 2)


def test_a_late_delete_of_an_earlier_life_is_ignored() -> None:
    journal = Journal(append(3), purge(), append(2))
    assert isinstance(journal.do(Delete(1, 2, Position(1, 0))), Unchanged)
    assert journal.standing == (True, 2, 0)


@pytest.mark.parametrize("before", [(), (append(3), purge())], ids=["no head", "grave"])
def test_a_late_delete_of_an_earlier_life_is_no_reset(before: tuple[Action, ...]) -> None:
    journal = Journal(*before)
    head = journal.head
    assert isinstance(journal.do(Delete(1, 2, Position(1, 0))), Unchanged)
    assert journal.head is head


@pytest.mark.parametrize("before", [(), (append(2),)], ids=["no head", "head"])
@pytest.mark.parametrize("to", [0, -1])
def test_a_delete_of_nothing_does_nothing(before: tuple[Action, ...], to: int) -> None:
    assert isinstance(Journal(*before).do(delete(to)), Unchanged)


# ---- rule 4: an incarnation is the position of the creating record


def test_the_incarnation_is_where_the_life_began_and_stays() -> None:
    journal = Journal(Mark(1), append(), append(), delete(1))
    assert journal.head is not None
    assert (journal.head.incarnation, journal.head.position) == (Position(1, 1), Position(1, 3))


def test_the_grave_keeps_the_incarnation_that_it_buries() -> None:
    journal = Journal(append(), append(), purge())
    assert journal.head is not None
    assert (journal.head.incarnation, journal.head.position) == (Position(1, 0), Position(1, 2))


@pytest.mark.parametrize("again", [append(), delete(1)], ids=repr)
def test_each_life_has_an_incarnation_of_its_own(again: Action) -> None:
    journal = Journal(append(), purge(), again)
    assert journal.head is not None
    assert journal.head.incarnation == Position(1, 2)


# ---- rule 6: expiry


def test_an_expiry_counts_from_the_append() -> None:
    journal = Journal(append(expire_after_ms=500))
    assert journal.head is not None
    assert journal.head.expires_at_ms == T0 + 500


def test_an_append_without_expiry_keeps_it_and_restarts_its_clock() -> None:
    journal = Journal(append(expire_after_ms=500), append())
    assert journal.head is not None
    assert journal.head.expires_at_ms == T0 + 1000 + 500


def test_an_append_with_another_expiry_replaces_it() -> None:
    journal = Journal(append(expire_after_ms=500), append(expire_after_ms=7))
    assert journal.head is not None
    assert journal.head.expires_at_ms == T0 + 1000 + 7


def test_an_append_with_never_removes_the_expiry() -> None:
    journal = Journal(append(expire_after_ms=500), append(expire_after_ms=NEVER))
    assert journal.head is not None
    assert journal.head.expires_at_ms is None


def test_a_void_append_does_not_touch_the_expiry() -> None:
    journal = Journal(append(expire_after_ms=500), append(expected=0, expire_after_ms=9))
    assert journal.head is not None
    assert journal.head.expires_at_ms == T0 + 500


def test_a_delete_does_not_restart_the_clock() -> None:
    journal = Journal(append(2, expire_after_ms=500), delete(1))
    assert journal.head is not None
    assert journal.head.expires_at_ms == T0 + 500


def test_a_new_life_does_not_inherit_the_expiry() -> None:
    journal = Journal(append(expire_after_ms=500), purge(), append())
    assert journal.head is not None
    assert journal.head.expires_at_ms is None


def test_the_expiry_of_an_old_life_cannot_kill_a_new_one_with_as_many_events() -> None:
    journal = Journal(append(2, expire_after_ms=500))
    assert journal.head is not None
    expiry = Purge(1, journal.head.position)
    journal.do(purge())
    journal.do(append(2))
    assert isinstance(journal.do(expiry), Unchanged)


def test_a_fresh_append_wins_over_an_expiry_that_was_decided_before_it() -> None:
    journal = Journal(append(2, expire_after_ms=500))
    assert journal.head is not None
    expiry = Purge(1, journal.head.position)
    journal.do(append())
    assert isinstance(journal.do(expiry), Unchanged)


# ---- rule 7: append ids

ID = b"i" * 16


def test_a_known_id_gives_the_first_result_and_changes_nothing() -> None:
    journal = Journal(append(2, append_id=ID), append())
    before = journal.head
    assert journal.do(append(2, append_id=ID)) == Repeated(1, 2, Position(1, 0))
    assert journal.head is before


def test_a_known_id_gives_the_first_result_even_where_the_expectation_no_longer_holds() -> None:
    journal = Journal(append(2, append_id=ID, expected=0))
    assert journal.do(append(2, append_id=ID, expected=0)) == Repeated(1, 2, Position(1, 0))


def test_a_grave_still_knows_the_ids_of_its_life() -> None:
    journal = Journal(append(2, append_id=ID), purge())
    assert journal.do(append(2, append_id=ID)) == Repeated(1, 2, Position(1, 0))


@pytest.mark.parametrize("again", [append(), delete(3)], ids=repr)
def test_the_next_life_still_knows_the_ids_of_the_one_before(again: Action) -> None:
    journal = Journal(append(2, append_id=ID), purge(), again)
    assert journal.do(append(2, append_id=ID)) == Repeated(1, 2, Position(1, 0))


def test_a_void_append_leaves_no_id_behind() -> None:
    journal = Journal(append(2), append(append_id=ID, expected=0))
    assert journal.do(append(append_id=ID, expected=2)) == Appended(3, 3, 2)


def test_the_last_ids_are_remembered_and_no_more() -> None:
    journal = Journal(append(append_id=ID), *[append() for _ in range(RECENT_MAX - 1)])
    assert isinstance(journal.do(append(append_id=ID)), Repeated)
    journal = Journal(append(append_id=ID), *[append() for _ in range(RECENT_MAX)])
    assert isinstance(journal.do(append(append_id=ID)), Appended)


def test_the_head_tells_the_newest_id_that_it_forgot() -> None:
    journal = Journal(*[append() for _ in range(RECENT_MAX + 3)])
    assert journal.head is not None
    assert len(journal.head.recent) == RECENT_MAX
    assert journal.head.evicted == Position(1, 2)


def evicting() -> Journal:
    """A journal that has forgotten its appends at offsets 0 and 1."""
    return Journal(*[append() for _ in range(RECENT_MAX + 2)])


@pytest.mark.parametrize("floor", [0, 1])
def test_a_retry_whose_first_attempt_may_be_forgotten_is_void(floor: int) -> None:
    journal = evicting()
    before = journal.head
    assert isinstance(journal.do(append(append_id=ID, floor=floor)), Forgotten)
    assert journal.head is before


def test_a_retry_whose_first_attempt_would_still_be_known_is_a_plain_append() -> None:
    assert isinstance(evicting().do(append(append_id=ID, floor=2)), Appended)


def test_a_first_attempt_is_never_too_late() -> None:
    assert isinstance(evicting().do(append(append_id=ID)), Appended)


def test_a_purge_does_not_make_a_late_retry_acceptable() -> None:
    journal = evicting()
    journal.do(purge())
    assert isinstance(journal.do(append(append_id=ID, floor=1)), Forgotten)


def test_a_retry_from_before_this_epoch_is_void_if_any_id_was_forgotten() -> None:
    journal = evicting()
    journal.epoch, journal.offset = 2, 0
    assert isinstance(journal.do(append(append_id=ID, floor=-1, epoch=2)), Forgotten)


def test_a_retry_from_before_this_epoch_is_a_plain_append_while_nothing_was_forgotten() -> None:
    journal = Journal(append())
    journal.epoch, journal.offset = 2, 0
    assert isinstance(journal.do(append(append_id=ID, floor=-1, epoch=2)), Appended)


# ---- jumps and bounds


def test_a_jump_over_a_whole_segment_is_recorded() -> None:
    journal = Journal(append(3), append(at=10**15))
    assert journal.head is not None
    assert journal.head.jumps == (Jump(3, 10**15),)


@pytest.mark.parametrize(("at", "jumps"), [(8, ()), (9, (Jump(3, 9),))])
def test_a_gap_narrower_than_a_segment_is_no_jump(at: int, jumps: tuple[Jump, ...]) -> None:
    journal = Journal(append(3), append(at=at))
    assert journal.head is not None
    assert journal.head.jumps == jumps


def test_a_reset_is_a_jump_from_the_start() -> None:
    journal = Journal(delete(10**12), append())
    assert journal.head is not None
    assert journal.head.jumps == (Jump(0, 10**12 + 1),)


def test_a_new_life_forgets_the_jumps() -> None:
    journal = Journal(append(at=100), purge(), append())
    assert journal.head is not None
    assert journal.head.jumps == ()


def test_past_their_bound_the_narrowest_jump_is_forgotten() -> None:
    wide = [1_000 * i for i in range(1, JUMPS_MAX + 1)]
    journal = Journal(*[append(at=number) for number in [*wide[:7], wide[6] + 500, *wide[7:]]])
    assert journal.head is not None
    assert len(journal.head.jumps) == JUMPS_MAX
    assert [jump.last for jump in journal.head.jumps] == sorted(jump.last for jump in journal.head.jumps)
    assert Jump(wide[6], wide[6] + 500) not in journal.head.jumps


def test_a_journal_keeps_the_segment_size_that_it_began_with() -> None:
    head, _ = fold(None, append(append_id=ID), Position(1, 0), T0, FACTS)
    other = msgspec.structs.replace(FACTS, segment_size=9)
    head, _ = fold(head, append(), Position(1, 1), T0, other)
    assert head is not None
    assert head.segment_size == 5


def test_the_last_number_can_be_taken_and_nothing_comes_after_it() -> None:
    journal = Journal(append(at=LAST))
    assert journal.standing == (True, LAST, 0)
    assert journal.do(append()) == Lost(LAST)
    assert journal.do(append(expected=LAST)) == Lost(LAST)


def test_an_append_that_would_pass_the_last_number_is_void() -> None:
    assert Journal(append(3)).do(append(2, at=LAST)) == Lost(3)


def test_an_append_that_brings_a_journal_too_many_different_tags_is_void() -> None:
    def tagged(first: int, count: int) -> Append:
        return msgspec.structs.replace(append(), tagged=tuple((f"t-{n}", 1) for n in range(first, first + count)))

    journal = Journal(tagged(0, JOURNAL_TAGS_MAX - 1))
    before = journal.head
    assert journal.do(tagged(JOURNAL_TAGS_MAX - 2, 3)) == Crowded()
    assert journal.head is before
    assert isinstance(journal.do(tagged(0, JOURNAL_TAGS_MAX)), Appended)
    assert isinstance(journal.do(append()), Appended), "others go on"
    journal.do(purge())
    assert isinstance(journal.do(tagged(JOURNAL_TAGS_MAX, 5)), Appended), "a new life has no tags"
