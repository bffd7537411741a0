"""The fold: one test for each combination of head and action, and each rule of identity and position."""

from __future__ import annotations

import msgspec
import pytest

from tidebook.core.action import NEVER, Action, Append, Damaged, Delete, Mark, Purge, Seal
from tidebook.core.fold import (
    AppendApplied,
    AppendRepeated,
    Change,
    DeleteApplied,
    PurgeApplied,
    Rejected,
    RetryTooLate,
    Stale,
    TooManyTags,
    Unchanged,
    fold,
)
from tidebook.core.head import GRAVE_RETENTION_MS, JOURNAL_TAGS_MAX, RECENT_MAX, Head, Jump, encode_head
from tidebook.core.position import Position
from tidebook.core.seq_nr import LAST
from tidebook.core.topic_config import TopicConfig
from tidebook.testing.action_histories import append, delete, purge

CONFIG = TopicConfig(topic_id="t", partitions=1, segment_size=5)
T0 = 1_700_000_000_000


class Journal:
    """A journal that folds actions, each at the next offset and a second after the previous one."""

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
        self.head, change = fold(self.head, action, at, T0 + 1000 * self.offset, CONFIG)
        self.offset += 1
        return change

    @property
    def state(self) -> tuple[bool, int, int]:
        """Whether the journal is live, its last number, and the number up to which it is deleted."""
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
    assert journal.do(append(2)) == AppendApplied(1, 2, 0)
    assert journal.state == (True, 2, 0)


def test_on_no_head_an_append_that_expects_0_is_valid() -> None:
    assert Journal().do(append(2, expected=0)) == AppendApplied(1, 2, 0)


def test_on_no_head_an_append_that_expects_a_number_is_rejected() -> None:
    journal = Journal()
    assert journal.do(append(expected=1)) == Rejected(0)
    assert journal.head is None


def test_on_no_head_an_append_at_a_number_starts_there() -> None:
    assert Journal().do(append(2, at=3)) == AppendApplied(3, 4, 0)


def test_on_no_head_a_delete_creates_a_reset() -> None:
    journal = Journal()
    assert journal.do(delete(7)) == DeleteApplied(0, 7)
    assert journal.state == (True, 7, 7)


def test_on_no_head_a_delete_of_one_event_creates_a_reset_too() -> None:
    assert Journal().do(delete(1)) == DeleteApplied(0, 1)


# ---- the table: a head


@pytest.mark.parametrize("action", [Mark(1), Mark(1, T0), Seal(1), Damaged("x")], ids=repr)
def test_on_a_head_a_mark_a_seal_or_damage_returns_the_same_head(action: Action | Damaged) -> None:
    journal = Journal(append(2))
    before = journal.head
    assert isinstance(journal.do(action), Unchanged)
    assert journal.head is before


def test_on_a_head_an_append_numbered_next_follows_it() -> None:
    assert Journal(append(2)).do(append(3)) == AppendApplied(3, 5, 2)


def test_on_a_head_an_append_that_expects_its_number_follows_it() -> None:
    assert Journal(append(2)).do(append(expected=2)) == AppendApplied(3, 3, 2)


@pytest.mark.parametrize("expected", [0, 1, 3])
def test_on_a_head_an_append_that_expects_another_number_is_rejected_with_the_last_number(expected: int) -> None:
    journal = Journal(append(2))
    before = journal.head
    assert journal.do(append(expected=expected)) == Rejected(2)
    assert journal.head is before


def test_on_a_head_an_append_at_a_number_above_it_may_skip_numbers() -> None:
    assert Journal(append(2)).do(append(2, at=5)) == AppendApplied(5, 6, 2)


@pytest.mark.parametrize("at", [1, 2])
def test_on_a_head_an_append_at_a_number_that_is_taken_is_rejected(at: int) -> None:
    journal = Journal(append(2))
    before = journal.head
    assert journal.do(append(at=at)) == Rejected(2)
    assert journal.head is before


def test_on_a_head_a_delete_removes_events_up_to_its_number() -> None:
    journal = Journal(append(3))
    assert journal.do(delete(2)) == DeleteApplied(0, 2)
    assert journal.state == (True, 3, 2)


def test_on_a_head_a_delete_never_removes_future_events() -> None:
    journal = Journal(append(3))
    assert journal.do(delete(99)) == DeleteApplied(0, 3)
    assert journal.state == (True, 3, 3)
    assert journal.do(append()) == AppendApplied(4, 4, 3)


@pytest.mark.parametrize("to", [1, 2])
def test_on_a_head_a_delete_of_deleted_events_returns_the_same_head(to: int) -> None:
    journal = Journal(append(3), delete(2))
    before = journal.head
    assert isinstance(journal.do(delete(to)), Unchanged)
    assert journal.head is before


def test_on_a_head_a_purge_leaves_a_grave() -> None:
    journal = Journal(append(3), delete(1))
    assert isinstance(journal.do(purge()), PurgeApplied)
    assert journal.state == (False, 3, 1)


def test_on_a_head_a_purge_at_its_position_leaves_a_grave() -> None:
    assert isinstance(Journal(append(3)).do(Purge(1, Position(1, 0))), PurgeApplied)


def test_on_a_head_a_purge_at_another_position_does_nothing() -> None:
    journal = Journal(append(3), append())
    before = journal.head
    assert isinstance(journal.do(Purge(1, Position(1, 0))), Unchanged)
    assert journal.head is before


# ---- the table: a grave counts as no head


def test_after_a_purge_the_next_append_creates_a_new_incarnation_from_1() -> None:
    journal = Journal(append(3), delete(2), purge())
    assert journal.do(append(2)) == AppendApplied(1, 2, 0)
    assert journal.state == (True, 2, 0)


def test_after_a_purge_expected_0_is_valid_and_the_old_number_is_rejected() -> None:
    journal = Journal(append(3), purge())
    assert journal.do(append(expected=3)) == Rejected(0)
    assert journal.do(append(expected=0)) == AppendApplied(1, 1, 0)


def test_after_a_purge_a_number_below_the_old_one_may_be_taken() -> None:
    assert Journal(append(3), purge()).do(append(at=2)) == AppendApplied(2, 2, 0)


def test_after_a_purge_another_purge_does_nothing() -> None:
    journal = Journal(append(3), purge())
    before = journal.head
    assert isinstance(journal.do(purge()), Unchanged)
    assert journal.head is before


def test_after_a_purge_a_delete_creates_a_reset() -> None:
    journal = Journal(append(3), purge())
    assert journal.do(delete(2)) == DeleteApplied(0, 2)
    assert journal.state == (True, 2, 2)


# ---- rule 1: an epoch is part of the identity


@pytest.mark.parametrize("action", [append(epoch=1), delete(1, epoch=1), purge(epoch=1)], ids=repr)
@pytest.mark.parametrize("before", [(), (append(2, epoch=2),)], ids=["no head", "head"])
def test_an_action_for_another_epoch_has_no_effect(action: Action, before: tuple[Action, ...]) -> None:
    journal = Journal(*before, epoch=2)
    head = journal.head
    assert isinstance(journal.do(action), Stale)
    assert journal.head is head


def test_a_journal_continues_in_the_next_epoch() -> None:
    journal = Journal(append(2))
    journal.epoch, journal.offset = 2, 0
    assert journal.do(append(epoch=2)) == AppendApplied(3, 3, 2)
    assert journal.head is not None
    assert (journal.head.incarnation, journal.head.position) == (Position(1, 0), Position(2, 0))


# ---- rule 3: the last number is the larger of seq_nr and delete_to


def test_after_a_delete_on_no_journal_its_number_is_the_last_one() -> None:
    journal = Journal(delete(7))
    assert journal.do(append(expected=0)) == Rejected(7)
    assert journal.do(append(at=7)) == Rejected(7)
    assert journal.do(append(expected=7)) == AppendApplied(8, 8, 7)


def test_after_a_delete_on_no_journal_a_number_above_it_may_be_taken() -> None:
    assert Journal(delete(7)).do(append(at=8)) == AppendApplied(8, 8, 7)


def test_a_delete_for_the_current_incarnation_is_applied() -> None:
    assert Journal(append(3)).do(Delete(1, 2, Position(1, 0))) == DeleteApplied(0, 2)


def test_a_late_delete_for_an_earlier_incarnation_is_ignored() -> None:
    journal = Journal(append(3), purge(), append(2))
    assert isinstance(journal.do(Delete(1, 2, Position(1, 0))), Unchanged)
    assert journal.state == (True, 2, 0)


@pytest.mark.parametrize("before", [(), (append(3), purge())], ids=["no head", "grave"])
def test_a_late_delete_for_an_earlier_incarnation_creates_no_journal(before: tuple[Action, ...]) -> None:
    journal = Journal(*before)
    head = journal.head
    assert isinstance(journal.do(Delete(1, 2, Position(1, 0))), Unchanged)
    assert journal.head is head


@pytest.mark.parametrize("before", [(), (append(2),)], ids=["no head", "head"])
@pytest.mark.parametrize("to", [0, -1])
def test_a_delete_of_nothing_does_nothing(before: tuple[Action, ...], to: int) -> None:
    assert isinstance(Journal(*before).do(delete(to)), Unchanged)


# ---- rule 4: an incarnation is the position of the creating record


def test_the_incarnation_is_the_position_of_the_creating_record() -> None:
    journal = Journal(Mark(1), append(), append(), delete(1))
    assert journal.head is not None
    assert (journal.head.incarnation, journal.head.position) == (Position(1, 1), Position(1, 3))


def test_a_grave_has_the_incarnation_of_the_purged_journal() -> None:
    journal = Journal(append(), append(), purge())
    assert journal.head is not None
    assert (journal.head.incarnation, journal.head.position) == (Position(1, 0), Position(1, 2))


@pytest.mark.parametrize("creating", [append(), delete(1)], ids=repr)
def test_a_journal_created_after_a_purge_has_a_new_incarnation(creating: Action) -> None:
    journal = Journal(append(), purge(), creating)
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


def test_a_rejected_append_does_not_change_the_expiry() -> None:
    journal = Journal(append(expire_after_ms=500), append(expected=0, expire_after_ms=9))
    assert journal.head is not None
    assert journal.head.expires_at_ms == T0 + 500


def test_a_delete_does_not_restart_the_clock() -> None:
    journal = Journal(append(2, expire_after_ms=500), delete(1))
    assert journal.head is not None
    assert journal.head.expires_at_ms == T0 + 500


def test_a_new_incarnation_does_not_inherit_the_expiry() -> None:
    journal = Journal(append(expire_after_ms=500), purge(), append())
    assert journal.head is not None
    assert journal.head.expires_at_ms is None


def test_the_expiry_of_an_old_incarnation_cannot_purge_a_new_one_with_as_many_events() -> None:
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


def test_a_known_append_id_returns_the_first_result_and_changes_nothing() -> None:
    journal = Journal(append(2, append_id=ID), append())
    before = journal.head
    assert journal.do(append(2, append_id=ID)) == AppendRepeated(1, 2, Position(1, 0))
    assert journal.head is before


def test_a_known_append_id_returns_the_first_result_even_if_the_expectation_no_longer_holds() -> None:
    journal = Journal(append(2, append_id=ID, expected=0))
    assert journal.do(append(2, append_id=ID, expected=0)) == AppendRepeated(1, 2, Position(1, 0))


def test_a_grave_remembers_the_append_ids_of_its_incarnation() -> None:
    journal = Journal(append(2, append_id=ID), purge())
    assert journal.do(append(2, append_id=ID)) == AppendRepeated(1, 2, Position(1, 0))


@pytest.mark.parametrize("between", [append(), delete(3), Mark(1)], ids=repr)
def test_a_grave_forgets_its_append_ids_after_its_retention(between: Action) -> None:
    """Retention counts by record timestamps, so a fold gives the same result with the grave and after its removal."""
    journal = Journal(append(2, append_id=ID), purge())
    grave = journal.head
    assert grave is not None
    late_ms = grave.touched_ms + GRAVE_RETENTION_MS
    assert fold(grave, append(append_id=ID), Position(1, 9), late_ms, CONFIG)[1] == AppendRepeated(1, 2, Position(1, 0))
    folded = [
        fold(
            fold(head, between, Position(1, 8), late_ms + 1, CONFIG)[0],
            append(append_id=ID),
            Position(1, 9),
            late_ms + 2,
            CONFIG,
        )
        for head in (grave, None)
    ]
    assert folded[0] == folded[1]
    assert isinstance(folded[0][1], AppendApplied)


@pytest.mark.parametrize("creating", [append(), delete(3)], ids=repr)
def test_the_next_incarnation_remembers_the_append_ids_of_the_previous_one(creating: Action) -> None:
    journal = Journal(append(2, append_id=ID), purge(), creating)
    assert journal.do(append(2, append_id=ID)) == AppendRepeated(1, 2, Position(1, 0))


def test_a_rejected_append_is_not_remembered() -> None:
    journal = Journal(append(2), append(append_id=ID, expected=0))
    assert journal.do(append(append_id=ID, expected=2)) == AppendApplied(3, 3, 2)


def test_only_the_most_recent_append_ids_are_remembered() -> None:
    journal = Journal(append(append_id=ID), *[append() for _ in range(RECENT_MAX - 1)])
    assert isinstance(journal.do(append(append_id=ID)), AppendRepeated)
    journal = Journal(append(append_id=ID), *[append() for _ in range(RECENT_MAX)])
    assert isinstance(journal.do(append(append_id=ID)), AppendApplied)


def test_the_head_records_the_newest_evicted_append() -> None:
    journal = Journal(*[append() for _ in range(RECENT_MAX + 3)])
    assert journal.head is not None
    assert len(journal.head.recent) == RECENT_MAX
    assert journal.head.evicted == Position(1, 2)


def evicting() -> Journal:
    """Return a journal that has evicted its appends at offsets 0 and 1."""
    return Journal(*[append() for _ in range(RECENT_MAX + 2)])


@pytest.mark.parametrize("floor", [0, 1])
def test_a_retry_whose_first_attempt_may_be_evicted_is_too_late(floor: int) -> None:
    journal = evicting()
    before = journal.head
    assert isinstance(journal.do(append(append_id=ID, floor=floor)), RetryTooLate)
    assert journal.head is before


def test_a_retry_whose_first_attempt_cannot_be_evicted_is_a_plain_append() -> None:
    assert isinstance(evicting().do(append(append_id=ID, floor=2)), AppendApplied)


def test_a_first_attempt_is_never_too_late() -> None:
    assert isinstance(evicting().do(append(append_id=ID)), AppendApplied)


def test_a_purge_does_not_make_a_late_retry_acceptable() -> None:
    journal = evicting()
    journal.do(purge())
    assert isinstance(journal.do(append(append_id=ID, floor=1)), RetryTooLate)


def test_a_retry_from_before_this_epoch_is_too_late_if_any_append_was_evicted() -> None:
    journal = evicting()
    journal.epoch, journal.offset = 2, 0
    assert isinstance(journal.do(append(append_id=ID, floor=-1, epoch=2)), RetryTooLate)


def test_a_retry_from_before_this_epoch_is_a_plain_append_while_none_was_evicted() -> None:
    journal = Journal(append())
    journal.epoch, journal.offset = 2, 0
    assert isinstance(journal.do(append(append_id=ID, floor=-1, epoch=2)), AppendApplied)


# ---- jumps and bounds


def test_a_jump_over_a_whole_segment_begins_a_run() -> None:
    journal = Journal(append(3), append(at=10**15))
    assert journal.head is not None
    assert journal.head.run_start == (10**15 - 1) // CONFIG.segment_size


@pytest.mark.parametrize(("at", "run_start"), [(8, 0), (10, 0), (11, 2), (15, 2), (16, 3)])
def test_a_gap_that_leaves_no_segment_empty_is_no_jump(at: int, run_start: int) -> None:
    journal = Journal(append(3), append(at=at))
    assert journal.head is not None
    assert journal.head.run_start == run_start


def test_a_delete_on_no_journal_begins_a_run_after_the_deleted_numbers() -> None:
    journal = Journal(delete(10**12), append())
    assert journal.head is not None
    assert journal.head.run_start == 10**12 // CONFIG.segment_size


def test_a_new_incarnation_begins_at_the_first_segment() -> None:
    journal = Journal(append(at=100), purge(), append())
    assert journal.head is not None
    assert journal.head.run_start == 0


def test_a_head_stays_small_however_often_numbers_are_skipped() -> None:
    journal = Journal(*[append(at=1_000_000 * i) for i in range(1, 200)])
    assert journal.head is not None
    assert len(encode_head(journal.head)) < 1000


def test_a_jump_drops_the_gaps_of_an_earlier_version() -> None:
    journal = Journal(append())
    assert journal.head is not None
    journal.head = msgspec.structs.replace(journal.head, jumps=(Jump(1, 100),), seq_nr=100)
    journal.do(append())
    assert journal.head.jumps == (Jump(1, 100),)
    journal.do(append(at=10**9))
    assert not journal.head.jumps


def test_a_grave_keeps_only_what_prevents_replays() -> None:
    tagged = tuple((f"tag-{i}", 1) for i in range(5000))
    journal = Journal(msgspec.structs.replace(append(expire_after_ms=5), tagged=tagged), purge())
    assert journal.head is not None
    assert not journal.head.live
    assert journal.head.tag_counts == {}
    assert len(journal.head.recent) == 1
    assert len(encode_head(journal.head)) < 1000


def test_a_journal_keeps_the_segment_size_that_it_began_with() -> None:
    head, _ = fold(None, append(append_id=ID), Position(1, 0), T0, CONFIG)
    other = msgspec.structs.replace(CONFIG, segment_size=9)
    head, _ = fold(head, append(), Position(1, 1), T0, other)
    assert head is not None
    assert head.segment_size == 5


def test_the_last_number_can_be_taken_and_nothing_comes_after_it() -> None:
    journal = Journal(append(at=LAST))
    assert journal.state == (True, LAST, 0)
    assert journal.do(append()) == Rejected(LAST)
    assert journal.do(append(expected=LAST)) == Rejected(LAST)


def test_an_append_beyond_the_greatest_number_is_rejected() -> None:
    assert Journal(append(3)).do(append(2, at=LAST)) == Rejected(3)


def test_an_append_with_too_many_different_tags_has_no_effect() -> None:
    def tagged(first: int, count: int) -> Append:
        return msgspec.structs.replace(append(), tagged=tuple((f"t-{n}", 1) for n in range(first, first + count)))

    journal = Journal(tagged(0, JOURNAL_TAGS_MAX - 1))
    before = journal.head
    assert journal.do(tagged(JOURNAL_TAGS_MAX - 2, 3)) == TooManyTags()
    assert journal.head is before
    assert isinstance(journal.do(tagged(0, JOURNAL_TAGS_MAX)), AppendApplied)
    assert isinstance(journal.do(append()), AppendApplied), "other appends are accepted"
    journal.do(purge())
    assert isinstance(journal.do(tagged(JOURNAL_TAGS_MAX, 5)), AppendApplied), "a new incarnation has no tags"


# ---- the incarnation that an append expects


def test_an_append_that_expects_the_incarnation_is_valid_in_it() -> None:
    journal = Journal(append(2))
    same = msgspec.structs.replace(append(expected=2), incarnation=Position(1, 0))
    assert journal.do(same) == AppendApplied(3, 3, 2)


def test_an_append_is_void_in_an_incarnation_that_has_grown_to_the_same_number() -> None:
    journal = Journal(append(2), purge(), append(2))
    earlier = msgspec.structs.replace(append(expected=2), incarnation=Position(1, 0))
    assert journal.do(earlier) == Rejected(2)


def test_an_append_that_expects_an_incarnation_is_void_where_there_is_no_journal() -> None:
    nothing = msgspec.structs.replace(append(expected=0), incarnation=Position(1, 0))
    assert Journal().do(nothing) == Rejected(0)
    assert Journal(append(1), purge()).do(nothing) == Rejected(0)


def test_a_first_attempt_at_the_start_of_this_epoch_is_after_everything_evicted_before_it() -> None:
    journal = evicting()
    journal.epoch, journal.offset = 2, 5
    action = append(append_id=ID, floor=0)
    assert isinstance(journal.do(msgspec.structs.replace(action, epoch=2)), AppendApplied)
