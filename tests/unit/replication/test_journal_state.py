"""A journal folded from its log, and its differences from a damaged store."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidebook.core.action import Action, Append, Purge
from tidebook.core.event import Event, encode_events
from tidebook.core.head import RECENT_MAX, Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.repair import Damage, Repair
from tidebook.core.replication_plan import Pointer, PositionedAction, TagPosition, plan_key
from tidebook.replication.journal_state import (
    FoldedJournal,
    JournalState,
    differences,
    fold_journal,
    is_certain,
    is_repairable,
    plan_repair,
)
from tidebook.testing.conformance.journal_records import (
    Step,
    append,
    delete,
    expected_journals,
    purge,
    records_of,
    topic_config,
)

CONFIG = topic_config()
KEY = Key("t", "a")

ACTIONS = st.one_of(
    st.builds(append, st.integers(1, 3)),
    st.builds(lambda n: append(1, expected=n), st.integers(0, 6)),
    st.builds(lambda n: append(1, at=n), st.integers(1, 12)),
    st.builds(delete, st.integers(1, 8)),
    st.just(purge()),
)


def placed(actions: list[Action]) -> list[PositionedAction]:
    steps: list[Step] = [("a", action) for action in actions]
    return [
        PositionedAction(
            Position(CONFIG.epoch, record.offset),
            record.timestamp_ms,
            read_record(record.value, limit_bytes=10**6),
            record.timestamp_ms,
        )
        for record in records_of(steps)
    ]


def store_of(actions: list[Action]) -> JournalState:
    truth = expected_journals([("a", action) for action in actions], CONFIG).get("a")
    return JournalState() if truth is None else JournalState(truth.head, {row.seq_nr: row for row in truth.rows})


@given(st.lists(ACTIONS, max_size=12))
def test_a_store_that_equals_the_fold_has_no_difference(actions: list[Action]) -> None:
    found = store_of(actions)
    folded = fold_journal(KEY, 0, found, placed(actions), CONFIG, Position(CONFIG.epoch, 0))
    assert differences(folded, found) == []


@given(st.lists(ACTIONS, min_size=1, max_size=12), st.data())
def test_the_effects_of_lost_first_records_are_taken_from_the_store(actions: list[Action], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(actions)))
    found = store_of(actions)
    folded = fold_journal(KEY, 0, found, placed(actions)[start:], CONFIG, Position(CONFIG.epoch, start))
    assert differences(folded, found) == []


@settings(max_examples=60)
@given(st.lists(ACTIONS, min_size=1, max_size=10), st.data())
def test_a_repair_restores_everything_that_was_damaged(actions: list[Action], data: st.DataObject) -> None:
    truth = store_of(actions)
    rows = dict(truth.rows)
    for seq_nr in data.draw(st.lists(st.integers(1, 15), max_size=4)):
        row = rows.pop(seq_nr, None)
        if row is None and truth.rows:
            some = next(iter(truth.rows.values()))
            rows[seq_nr] = msgspec.structs.replace(some, seq_nr=seq_nr, encoded=b"extra")
    head = truth.head
    if head is not None and data.draw(st.booleans()):
        head = msgspec.structs.replace(head, seq_nr=head.seq_nr + 1)
    found = JournalState(head, rows)
    records = placed(actions)
    pointer = Pointer(records[-1].position, 0)
    folded = fold_journal(KEY, 0, found, records, CONFIG, Position(CONFIG.epoch, 0))
    repair = plan_repair(folded, found, pointer, CONFIG, 1)
    repaired = {n: row for n, row in rows.items() if n not in repair.extra_rows} | {
        row.seq_nr: row for row in repair.rows
    }
    after = JournalState(repair.head, repaired)
    assert differences(fold_journal(KEY, 0, after, records, CONFIG, Position(CONFIG.epoch, 0)), after) == []


@pytest.mark.parametrize("what", ["head extra", "event extra"])
def test_a_journal_without_records_in_the_log_is_extra(what: str) -> None:
    found = store_of([append(2)])
    folded = fold_journal(KEY, 0, found, [], CONFIG, Position(CONFIG.epoch, 0))
    assert what in {each.what for each in differences(folded, found)}


# Tags, damage, and a log that begins later than the journal


def tagged(count: int, *tags: str) -> Append:
    body, counts = encode_events([Event(n, tags=set(tags)) for n in range(count)])
    return Append(CONFIG.epoch, b"", count, body, tagged=counts)


def folded_from(actions: list[Action], found: JournalState | None = None, start: int = 0) -> FoldedJournal:
    """Fold a log that begins at `start`."""
    since = Position(CONFIG.epoch, start)
    return fold_journal(KEY, 0, found or JournalState(), placed(actions)[start:], CONFIG, since)


def stored(actions: list[Action]) -> JournalState:
    """Return the state of a journal in a store, including tag rows."""
    return folded_from(actions).state


def damage(what: str, seq_nr: int | None = None, place: TagPosition | None = None) -> Damage:
    return Damage(what, *KEY, "it is not readable", seq_nr, place)


def summaries(folded: FoldedJournal, found: JournalState) -> list[tuple[str, int | None]]:
    return [(each.what, each.seq_nr) for each in differences(folded, found)]


def repair(folded: FoldedJournal, found: JournalState, at: int = 99) -> Repair:
    return plan_repair(folded, found, Pointer(Position(CONFIG.epoch, at), 5), CONFIG, 3)


TAGGED: list[Action] = [tagged(3, "x", "y"), append(1), tagged(1, "x")]


def test_a_delete_and_a_purge_clear_rows_and_tag_rows_as_a_store_does() -> None:
    kept = stored([*TAGGED, delete(2)])
    assert sorted(kept.rows) == [3, 4, 5]
    assert sorted((place.tag, row.seq_nr) for place, row in kept.tags.items()) == [("x", 3), ("x", 5), ("y", 3)]
    purged = stored([*TAGGED, purge()])
    assert (purged.rows, purged.tags, purged.head is not None and purged.head.live) == ({}, {}, False)
    followed = JournalState()
    writes = [*plan_key(KEY, None, placed([*TAGGED, delete(2), purge()]), CONFIG, clear_tags=False)]
    followed.apply(writes)
    assert (followed.rows, len(followed.tags)) == ({}, 7)


TAGGED_ACTIONS = st.one_of(ACTIONS, st.builds(tagged, st.integers(1, 3), st.just("x"), st.sampled_from("yz")))


@given(st.lists(TAGGED_ACTIONS, max_size=10), st.integers(0, 10), st.booleans())
@example([tagged(3, "x", "y"), delete(2)], 1, True)
@example([tagged(3, "x", "y"), purge()], 1, True)
def test_a_journal_is_the_same_whether_it_is_folded_in_one_slice_or_in_two(
    actions: list[Action], cut: int, clear_tags: bool
) -> None:
    records = placed(actions)
    whole, parts = JournalState(), JournalState()
    whole.apply(plan_key(KEY, None, records, CONFIG, clear_tags=clear_tags))
    for part in (records[:cut], records[cut:]):
        parts.apply(plan_key(KEY, parts.head, part, CONFIG, clear_tags=clear_tags))
    assert parts == whole


def test_rows_and_tag_rows_past_a_position_are_omitted() -> None:
    found = stored(TAGGED).up_to(Position(CONFIG.epoch, 1))
    assert sorted(found.rows) == [1, 2, 3, 4]
    assert {row.seq_nr for row in found.tags.values()} == {1, 2, 3}
    assert stored(TAGGED).up_to(Position(CONFIG.epoch, 2)) == stored(TAGGED)


def test_tag_rows_that_are_missing_extra_or_different_are_reported_and_repaired() -> None:
    found = stored(TAGGED)
    missing, differing = sorted(found.tags)[0], sorted(found.tags)[1]
    row = found.tags.pop(missing)
    found.tags[differing] = msgspec.structs.replace(found.tags[differing], encoded=b"other")
    extra = msgspec.structs.replace(row, tag="z")
    found.tags[extra.place] = extra
    folded = folded_from(TAGGED, found)
    assert summaries(folded, found) == [("tag missing", 1), ("tag differs", 2), ("tag extra", 1)]
    assert [each.expected or each.found for each in differences(folded, found)] == ["x", "x", "z"]
    repaired = repair(folded, found)
    assert {each.place for each in repaired.tags} == {missing, differing}
    assert repaired.extra_tags == (extra.place,)
    assert (repaired.rows, repaired.extra_rows, repaired.damaged_rows) == ((), (), frozenset())


def test_undecodable_data_is_reported_once_and_repaired_if_the_log_is_complete() -> None:
    found = stored(TAGGED)
    lost_tag = sorted(found.tags)[0]
    found.rows.pop(2)
    found.tags.pop(lost_tag)
    beyond = msgspec.structs.replace(lost_tag, time_ms=7)
    found.damaged = (damage("head"), damage("event", 2), damage("event", 9), damage("tag", 1, lost_tag),
                     damage("tag", None, beyond))  # fmt: skip
    found.head = None
    assert (found.head_damaged, found.damaged_rows, found.damaged_tags) == (
        True,
        frozenset({2, 9}),
        frozenset({lost_tag, beyond}),
    )
    folded = folded_from(TAGGED, found)
    reported = differences(folded, found)
    assert [(each.what, each.seq_nr) for each in reported] == [
        ("head damaged", None), ("event damaged", 2), ("event damaged", 9), ("tag damaged", 1), ("tag damaged", None),
    ]  # fmt: skip
    assert reported[0].expected is not None
    assert reported[0].expected.startswith("seq_nr 5, delete_to 0, position")
    assert reported[1].expected is not None
    assert reported[1].expected.endswith(f"bytes at {CONFIG.epoch}:0")
    assert [each.expected for each in reported[2:]] == [None, "x", "x"]
    assert {each.found for each in reported} == {"it is not readable"}
    assert is_certain(folded, found)
    assert all(is_repairable(each, folded, found) for each in reported)
    repaired = repair(folded, found)
    assert repaired.head == stored(TAGGED).head
    assert [row.seq_nr for row in repaired.rows] == [2]
    assert [row.place for row in repaired.tags] == [lost_tag]
    assert (repaired.extra_rows, repaired.extra_tags, repaired.damaged_rows) == ((9,), (beyond,), frozenset({2, 9}))


def test_a_state_without_damage_reports_none() -> None:
    found = stored(TAGGED)
    assert not found.head_damaged
    assert not found.damaged_rows
    assert not found.damaged_tags


#: Four appends of two events each; the tests lose the first two from the log.
LATER: list[Action] = [append(2), append(2), append(2), append(2)]


def test_a_damaged_head_is_certain_only_if_the_log_is_complete() -> None:
    found = stored(LATER)
    found.head, found.damaged = None, (damage("head"),)
    assert is_certain(folded_from(LATER, found), found)
    partial = folded_from(LATER, found, start=2)
    assert not is_certain(partial, found)
    [reported] = differences(partial, found)
    assert (reported.what, reported.expected) == ("head damaged", None)
    assert reported.found is not None
    assert "restore the store from a backup" in reported.found


@pytest.mark.parametrize(
    ("damaged", "remembered", "certain"),
    [
        ((), False, True),
        ((1,), False, True),
        ((4,), False, False),
        ((4,), True, True),
        ((3, 4), False, False),
        ((1, 4), False, False),
        ((3,), False, True),
        ((5,), False, False),
        ((6,), False, True),
        ((8,), False, True),
    ],
)
def test_damage_next_to_the_start_of_the_log_makes_the_numbers_uncertain(
    damaged: tuple[int, ...], remembered: bool, certain: bool
) -> None:
    """They are certain if the head remembers the appends before the start of the log."""
    found = stored(LATER)
    assert found.head is not None
    if not remembered:
        since = Position(CONFIG.epoch, 2)
        recent = tuple(each for each in found.head.recent if each.position >= since)
        found.head = msgspec.structs.replace(found.head, recent=recent)
    for number in damaged:
        del found.rows[number]
    found.damaged = tuple(damage("event", number) for number in damaged)
    folded = folded_from(LATER, found, start=2)
    assert folded.partial
    assert is_certain(folded, found) is certain


def test_damage_next_to_the_start_of_the_log_is_certain_if_the_head_remembers_the_first_append() -> None:
    found = stored(LATER)
    del found.rows[2]
    found.damaged = (damage("event", 2),)
    assert is_certain(folded_from(LATER, found, start=1), found)


def test_damage_is_certain_if_the_log_has_the_whole_journal() -> None:
    found = stored(LATER)
    del found.rows[1]
    found.damaged = (damage("event", 1),)
    assert is_certain(folded_from(LATER, found), found)


def test_a_damaged_row_that_was_deleted_makes_nothing_uncertain() -> None:
    actions: list[Action] = [*LATER, delete(4)]
    found = stored(actions)
    assert found.head is not None
    found.head = msgspec.structs.replace(found.head, recent=found.head.recent[2:])
    found.damaged = (damage("event", 4),)
    assert is_certain(folded_from(actions, found, start=2), found)


def test_the_last_row_of_a_journal_older_than_the_log_cannot_be_restored() -> None:
    found = stored(LATER)
    del found.rows[8]
    found.damaged = (damage("event", 8),)
    folded = folded_from(LATER, found, start=4)
    [reported] = differences(folded, found)
    assert (reported.what, reported.seq_nr) == ("event damaged", 8)
    assert not is_repairable(reported, folded, found)


@pytest.mark.parametrize(
    ("number", "repairable"), [(1, True), (2, True), (3, False), (4, False), (5, True), (8, True), (9, True)]
)
def test_a_live_row_older_than_the_log_cannot_be_restored(number: int, repairable: bool) -> None:
    """A row can be repaired if it was deleted, is in the log, or is past the end."""
    actions: list[Action] = [*LATER, delete(2)]
    found = stored(actions)
    found.rows.pop(number, None)
    found.damaged = (damage("event", number),)
    folded = folded_from(actions, found, start=2)
    reported = next(each for each in differences(folded, found) if each.what == "event damaged")
    assert is_repairable(reported, folded, found) is repairable
    assert is_repairable(msgspec.structs.replace(reported, what="tag damaged"), folded, found) is False
    assert is_repairable(msgspec.structs.replace(reported, what="event missing"), folded, found) is True


def test_a_partial_fold_reports_and_repairs_only_what_the_log_determines() -> None:
    actions: list[Action] = [*LATER, delete(2)]
    found = stored(actions)
    head = found.head
    assert head is not None
    del found.rows[4], found.rows[7]
    found.rows[9] = msgspec.structs.replace(found.rows[8], seq_nr=9, position=Position(CONFIG.epoch, 4))
    found.rows[8] = msgspec.structs.replace(found.rows[8], encoded=b"other")
    found.head = msgspec.structs.replace(head, seq_nr=9)
    folded = folded_from(actions, found, start=2)
    assert summaries(folded, found) == [
        ("head differs", None),
        ("event missing", 7),
        ("event differs", 8),
        ("event extra", 9),
    ]
    assert next((each.expected, each.found) for each in differences(folded, found)) == ("seq_nr 8", "seq_nr 9")
    repaired = repair(folded, found)
    assert ([row.seq_nr for row in repaired.rows], repaired.extra_rows, repaired.tags, repaired.extra_tags) == (
        [7, 8],
        (9,),
        (),
        (),
    )
    assert repaired.head == msgspec.structs.replace(found.head, seq_nr=8)  # everything else is taken from the store


def test_the_first_record_of_the_log_determines_its_rows() -> None:
    found = stored(LATER)
    found.rows[5] = msgspec.structs.replace(found.rows[5], encoded=b"other")
    found.rows[9] = msgspec.structs.replace(found.rows[6], seq_nr=9)
    folded = folded_from(LATER, found, start=2)
    assert summaries(folded, found) == [("event differs", 5), ("event extra", 9)]


def test_rows_below_delete_to_of_a_partial_journal_are_neither_missing_nor_restored() -> None:
    """Deletes older than the log are known only from the head."""
    found = stored(LATER)
    assert found.head is not None
    found.head = msgspec.structs.replace(found.head, delete_to=6)
    for number in (1, 5, 6, 7):
        del found.rows[number]
    folded = folded_from(LATER, found, start=2)
    assert summaries(folded, found) == [("event missing", 7)]
    assert [row.seq_nr for row in repair(folded, found).rows] == [7]


def test_an_earlier_incarnation_whose_start_the_log_has_lost_is_not_folded() -> None:
    """Its numbers would be wrong: the purge here would not find the position of the append that it names."""
    last_of_first = Position(CONFIG.epoch, 2)
    actions: list[Action] = [
        *(append(2), append(1), append(1, expected=3), Purge(CONFIG.epoch, last_of_first), append(2)),
    ]
    found = stored(actions)
    assert sorted(found.rows) == [1, 2]
    for start in range(len(actions)):
        assert differences(folded_from(actions, found, start=start), found) == []


def test_a_late_retry_stays_void_although_the_log_has_lost_the_appends_that_make_it_late() -> None:
    appended: list[Action] = [append(1) for _ in range(RECENT_MAX + 2)]
    retry = msgspec.structs.replace(append(1), append_id=b"r" * 16, floor=0)
    found = stored([*appended, retry])
    assert max(found.rows) == RECENT_MAX + 2
    assert differences(folded_from([*appended, retry], found, start=RECENT_MAX + 1), found) == []


def test_a_retry_is_judged_by_the_appends_that_were_evicted_before_it_and_not_later() -> None:
    retry = msgspec.structs.replace(append(1), append_id=b"r" * 16, floor=1)
    actions: list[Action] = [append(1), append(1), retry, *(append(1) for _ in range(RECENT_MAX - 1))]
    found = stored(actions)
    assert found.head is not None
    assert (found.head.evicted, max(found.rows)) == (Position(CONFIG.epoch, 1), RECENT_MAX + 2)
    assert differences(folded_from(actions, found, start=1), found) == []


def test_rows_left_by_a_purge_at_the_start_of_the_log_are_extra() -> None:
    actions: list[Action] = [append(2), purge()]
    found = stored(actions)
    found.rows = dict(stored(actions[:1]).rows)
    assert summaries(folded_from(actions, found, start=1), found) == [("event extra", 1), ("event extra", 2)]


def test_a_grave_where_the_log_has_a_journal_is_a_missing_head() -> None:
    found = stored([*LATER, purge()])
    assert summaries(folded_from(LATER), found)[0] == ("head missing", None)


def test_a_recent_append_of_the_head_that_contradicts_the_log_is_a_difference() -> None:
    actions: list[Action] = [append(1), purge(), append(2), append(1)]
    found = stored(actions)
    assert found.head is not None
    first, second, third = found.head.recent
    wrong = msgspec.structs.replace(second, last=9)
    found.head = msgspec.structs.replace(found.head, recent=(first, wrong, third))
    assert summaries(folded_from(actions, found, start=1), found) == [("head differs", None)]


def test_a_journal_that_was_never_in_the_log_is_replaced_by_a_grave_at_the_pointer() -> None:
    found = stored(LATER)
    repaired = repair(folded_from([], found), found, at=42)
    at = Position(CONFIG.epoch, 42)
    assert repaired.head == Head(False, 0, 0, at, at, CONFIG.segment_size, None, 0, (), None, ())
    assert repaired.extra_rows == tuple(range(1, 9))
    assert (repaired.rev, repaired.partition, repaired.pointer) == (3, 0, Pointer(at, 5))


def test_a_missing_head_is_reported_and_a_missing_grave_is_not() -> None:
    assert summaries(folded_from(LATER), JournalState(rows=stored(LATER).rows)) == [("head missing", None)]
    grave = stored([*LATER, purge()])
    assert summaries(folded_from([*LATER, purge()]), JournalState()) == []
    assert summaries(folded_from([*LATER, purge()]), grave) == []
    assert summaries(folded_from([*LATER, purge()]), stored(LATER))[0] == ("head extra", None)


def test_a_head_that_differs_is_shown_by_the_fields_that_differ() -> None:
    found = stored(LATER)
    assert found.head is not None
    found.head = msgspec.structs.replace(found.head, delete_to=1, expire_after_ms=7)
    [reported] = differences(folded_from(LATER, found), found)
    assert (reported.what, reported.expected, reported.found) == (
        "head differs",
        "delete_to 0, expire_after_ms None",
        "delete_to 1, expire_after_ms 7",
    )


def test_segments_are_listed_for_a_head_whose_last_run_began_after_a_jump() -> None:
    plain, jumped = stored(LATER), stored([append(2), append(1, at=1_000)])
    assert repair(folded_from(LATER), plain).segments == ()
    assert jumped.head is not None
    assert jumped.head.run_start > 0
    listed = repair(folded_from([append(2), append(1, at=1_000)]), jumped).segments
    assert set(listed) == {0, (1_000 - 1) // CONFIG.segment_size}


def test_rows_in_the_log_are_missing_whatever_a_wrong_head_says_was_deleted() -> None:
    found = stored(LATER)
    assert found.head is not None
    found.head = msgspec.structs.replace(found.head, delete_to=3)
    del found.rows[1], found.rows[3]
    folded = folded_from(LATER, found)
    assert summaries(folded, found) == [("head differs", None), ("event missing", 1), ("event missing", 3)]
    assert [row.seq_nr for row in repair(folded, found).rows] == [1, 3]


def test_a_damaged_row_of_unknown_number_has_no_expected_row() -> None:
    found = stored(LATER)
    found.damaged = (damage("event", None),)
    [reported] = differences(folded_from(LATER, found), found)
    assert (reported.what, reported.seq_nr, reported.expected) == ("event damaged", None, None)


@pytest.mark.parametrize(
    ("evicted", "recent_from", "last"),
    [(None, 2, 4), (None, 4, 8), (1, 2, 4), (2, 3, None), (3, 4, None)],
    ids=["the log has all later ones", "no later append", "evicted before", "evicted since", "evicted later"],
)
def test_the_last_number_before_the_log_is_known_from_the_recent_appends(
    evicted: int | None, recent_from: int, last: int | None
) -> None:
    """This matters if no row older than the log is left; the head must not have evicted a later append."""
    found = stored([*LATER, delete(8)])
    assert found.head is not None
    since = Position(CONFIG.epoch, 2)
    found.head = msgspec.structs.replace(
        found.head,
        recent=tuple(each for each in found.head.recent if each.position.offset >= recent_from),
        evicted=None if evicted is None else Position(CONFIG.epoch, evicted),
    )
    assert found.rows == {}
    folded = fold_journal(KEY, 0, found, [], CONFIG, since)
    assert folded.partial
    assert folded.state.head is not None
    if last is None:  # the fold can only repeat the state of the store
        assert folded.state == found
    else:
        assert (folded.state.head.seq_nr, folded.state.head.delete_to) == (last, 0)


def test_a_grave_older_than_the_log_stays_a_grave() -> None:
    found = stored([append(2), purge()])
    folded = fold_journal(KEY, 0, found, [], CONFIG, Position(CONFIG.epoch, 5))
    assert folded.state == found
    assert differences(folded, found) == []


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_appends_older_than_the_log_that_the_head_remembers_are_no_difference(start: int) -> None:
    """The journal began after the log's start, and its head remembers appends of an earlier incarnation."""
    actions: list[Action] = [append(1), purge(), append(2), append(1)]
    found = stored(actions)
    folded = folded_from(actions, found, start=start)
    assert folded.partial is (start == 3)
    assert differences(folded, found) == []
    longer: list[Action] = [append(1), append(1), purge(), append(2)]
    assert differences(folded_from(longer, stored(longer), start=start), stored(longer)) == []


def test_a_repaired_head_keeps_the_later_position() -> None:
    actions: list[Action] = [*LATER, delete(2)]
    found = stored(actions)
    head = found.head
    assert head is not None
    for offset in (3, 9):
        found.head = msgspec.structs.replace(head, position=Position(CONFIG.epoch, offset))
        repaired = repair(folded_from(actions, found, start=2), found)
        assert repaired.head.position == Position(CONFIG.epoch, max(4, offset))
        assert repaired.head.live
