"""The replication plan of one key: its writes, their order, and those that are repeated after a crash."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tidebook.core.action import Action, Append, Damaged, Mark, Purge
from tidebook.core.bounds import TICK_AHEAD_MS_MAX, TIME_MS_MAX
from tidebook.core.event import Event, encode_event, encode_events, pack_events
from tidebook.core.fold import fold
from tidebook.core.head import GRAVE_RETENTION_MS, Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import (
    RECORD_LAG_MS_MAX,
    ClearEvents,
    ClearJournal,
    EventRow,
    ForgetSegments,
    Pointer,
    PositionedAction,
    PutEvents,
    PutHead,
    PutSegments,
    PutTags,
    TagPosition,
    TopicPosition,
    TopicRow,
    Write,
    advance_time,
    may_remove_grave,
    plan_key,
)
from tidebook.core.topic_config import TopicConfig
from tidebook.testing.action_histories import append, delete, placed_at, purge

CONFIG = TopicConfig(topic_id="t", partitions=1, segment_size=5)
KEY = Key("orders", "o-1")


def positioned(*actions: Action | Damaged, start: int = 0) -> list[PositionedAction]:
    return [
        PositionedAction(
            Position(1, offset), 1000 * offset, placed_at(action, offset) if isinstance(action, Append) else action
        )
        for offset, action in enumerate(actions, start)
    ]


def head_after(records: Sequence[PositionedAction]) -> Head:
    head = None
    for record in records:
        head, _ = fold(head, record.action, record.position, record.timestamp_ms, CONFIG)
    assert head is not None
    return head


def plan(head: Head | None, records: Sequence[PositionedAction]) -> tuple[Write, ...]:
    return plan_key(KEY, head, records, CONFIG)


def kinds(writes: Sequence[Write]) -> list[type]:
    return [type(write) for write in writes]


def numbers(write: Write) -> list[int]:
    assert isinstance(write, PutEvents)
    return [row.seq_nr for row in write.rows]


def test_event_rows_are_written_before_the_head() -> None:
    records = positioned(append(2))
    writes = plan(None, records)
    assert kinds(writes) == [PutEvents, PutHead]
    assert numbers(writes[0]) == [1, 2]
    assert writes[1].head == head_after(records)


def test_a_row_has_the_position_of_its_record_and_its_index_within_it() -> None:
    (events, _) = plan(None, positioned(Mark(1), append(2)))
    assert isinstance(events, PutEvents)
    assert [(row.position, row.index, row.timestamp_ms) for row in events.rows] == [
        (Position(1, 1), 0, 1000),
        (Position(1, 1), 1, 1000),
    ]


def test_the_tombstones_of_a_delete_are_written_after_the_head() -> None:
    writes = plan(None, positioned(append(3), delete(2)))
    assert kinds(writes) == [PutEvents, PutHead, ClearEvents]


def test_events_that_the_same_slice_deletes_are_never_written() -> None:
    assert numbers(plan(None, positioned(append(3), delete(2)))[0]) == [3]


def test_a_delete_of_all_events_writes_no_rows() -> None:
    assert kinds(plan(None, positioned(append(3), delete(3)))) == [PutHead, ClearEvents]


def test_a_delete_clears_only_events_above_the_previous_delete_to() -> None:
    head = head_after(positioned(append(9), delete(4)))
    (_, clear) = plan(head, positioned(delete(8), start=2))
    assert isinstance(clear, ClearEvents)
    assert (clear.above, clear.head.delete_to) == (4, 8)


def test_the_tombstone_of_a_delete_is_bounded_by_the_last_number() -> None:
    writes = plan(None, positioned(append(3), delete(99)))
    assert writes[-1].head.delete_to == 3


@pytest.mark.parametrize("action", [Mark(1), purge(), append(expected=9), Damaged("x")], ids=repr)
def test_an_action_without_effect_writes_nothing(action: Action | Damaged) -> None:
    assert plan(None, positioned(action)) == ()


def test_an_unknown_change_is_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.core.replication_plan.fold", lambda head, *_: (head, object()))
    with pytest.raises(AssertionError):
        plan(None, positioned(append()))


def test_a_purge_writes_the_grave_and_then_clears() -> None:
    head = head_after(positioned(append(7)))
    writes = plan(head, positioned(purge(), start=1))
    assert kinds(writes) == [PutHead, ClearJournal]
    assert not writes[0].head.live
    assert writes[1].head == writes[0].head


def test_a_purge_is_cleared_before_the_next_incarnation_is_written() -> None:
    head = head_after(positioned(append(7)))
    writes = plan(head, positioned(append(), purge(), append(2), start=1))
    assert kinds(writes) == [PutHead, ClearJournal, PutEvents, PutHead]
    assert numbers(writes[2]) == [1, 2]


def test_a_journal_created_and_purged_in_one_slice_still_writes_its_grave() -> None:
    assert kinds(plan(None, positioned(append(2), purge()))) == [PutHead, ClearJournal]


def test_a_delete_before_a_purge_of_the_same_slice_needs_no_tombstone() -> None:
    assert kinds(plan(None, positioned(append(2), delete(1), purge()))) == [PutHead, ClearJournal]


def test_a_delete_in_the_next_incarnation_clears_from_its_first_event() -> None:
    head = head_after(positioned(append(9), delete(8)))
    clear = plan(head, positioned(purge(), append(6), delete(3), start=2))[-1]
    assert isinstance(clear, ClearEvents)
    assert (clear.above, clear.head.delete_to) == (0, 3)


def test_a_conditional_purge_that_fails_writes_nothing() -> None:
    head = head_after(positioned(append(2), append()))
    assert plan(head, positioned(Purge(1, Position(1, 0)), start=2)) == ()


# ---- replays after a crash


def test_records_that_the_head_contains_are_not_folded_twice() -> None:
    records = positioned(append(2), append())
    head = head_after(records)
    assert plan(head, records) == (PutHead(KEY, head),)


def test_a_skipped_record_rewrites_the_head_as_it_was_read() -> None:
    records = positioned(append(2), append())
    head = head_after(records[:1])
    writes = plan(head, records)
    assert writes[0] == PutHead(KEY, head)
    assert kinds(writes[1:]) == [PutEvents, PutHead]


def test_a_skipped_delete_is_cleared_again_from_the_first_segment() -> None:
    records = positioned(append(9), delete(4), delete(6))
    head = head_after(records)
    assert plan(head, records) == (PutHead(KEY, head), ClearEvents(KEY, head, 0))


def test_a_skipped_purge_is_cleared_again_before_the_next_incarnation() -> None:
    records = positioned(append(2), purge(), append())
    grave = head_after(records[:2])
    writes = plan(grave, records)
    assert writes[:2] == (PutHead(KEY, grave), ClearJournal(KEY, grave))
    assert kinds(writes[2:]) == [PutEvents, PutHead]


def test_a_skipped_purge_of_an_earlier_incarnation_is_not_repeated_on_the_current_one() -> None:
    records = positioned(append(2), purge(), append())
    head = head_after(records)
    assert plan(head, records) == (PutHead(KEY, head), ClearEvents(KEY, head, 0))


def test_a_skipped_mark_rewrites_the_head() -> None:
    head = head_after(positioned(append(), Mark(1), append()))
    assert plan(head, positioned(Mark(1), start=1)) == (PutHead(KEY, head),)


def test_a_slice_that_begins_after_the_head_repeats_nothing() -> None:
    head = head_after(positioned(append(9), delete(4)))
    assert kinds(plan(head, positioned(append(), start=2))) == [PutEvents, PutHead]


# ---- log time


def test_the_log_time_never_decreases() -> None:
    assert advance_time(45, 50, Mark(1)) == 50
    assert advance_time(60, 50, Mark(1)) == 60


def test_a_tick_advances_the_log_time() -> None:
    assert advance_time(0, 40, Mark(1, 70)) == 70
    assert advance_time(0, 40, Mark(1, 40 + TICK_AHEAD_MS_MAX)) == 40 + TICK_AHEAD_MS_MAX


def test_a_tick_too_far_after_its_own_record_is_ignored() -> None:
    assert advance_time(0, 40, Mark(1, 41 + TICK_AHEAD_MS_MAX)) == 40
    assert advance_time(50, 40, Mark(1, TIME_MS_MAX)) == 50


# ---- jumps


def test_a_jump_lists_the_segments_before_it_and_then_writes_the_head() -> None:
    head = head_after(records := positioned(append(7), append(at=100)))
    listing, rows, _ = plan(None, records)
    assert isinstance(listing, PutSegments)
    assert [*listing.segments] == [range(2)]
    assert numbers(rows) == [*range(1, 8), 100]
    assert head.run_start == 19


def test_segments_whose_events_are_cleared_are_not_listed() -> None:
    head = head_after(positioned(append(17), delete(12)))
    listing, *_ = plan(head, positioned(append(at=100), start=2))
    assert isinstance(listing, PutSegments)
    assert [*listing.segments] == [range(2, 4)]


def test_a_repeated_delete_lists_all_segments_of_its_run() -> None:
    head = head_after(records := positioned(append(17), delete(12)))
    writes = plan(head, [*records[1:], *positioned(append(at=100), start=2)])
    assert [[*write.segments] for write in writes if isinstance(write, PutSegments)] == [[range(4)]]


def test_segments_are_unlisted_when_they_are_cleared() -> None:
    head = head_after(positioned(append(7), append(at=100)))
    assert kinds(plan(head, positioned(delete(3), start=2))) == [PutHead, ClearEvents, ForgetSegments]
    assert kinds(plan(head, positioned(purge(), start=2))) == [PutHead, ClearJournal, ForgetSegments]
    assert kinds(plan(None, positioned(append(7), append(at=100), purge()))) == [
        PutSegments, PutHead, ClearJournal, ForgetSegments,
    ]  # fmt: skip


# ---- tag rows


def tagged_as(*tags: set[str], start: int = 0) -> PositionedAction:
    events = [Event(n, tags=each) for n, each in enumerate(tags)]
    body, counts = encode_events(events)
    action = Append(1, b"%016d" % start, len(events), body, tagged=counts)
    return PositionedAction(Position(1, start), 1000 * start, action, 2000 * start)


@pytest.mark.parametrize(
    "tags", [[{"x"}], [{"x", "y"}, {"x"}], [{"x"}, {"x"}], [{"x", "y"}, {"x", "y"}], [{"x"}, set()]]
)
def test_each_event_has_a_row_for_each_of_its_own_tags(tags: list[set[str]]) -> None:
    """Rows are numbered per tag over all events of the journal."""
    records = [tagged_as({"x"}), tagged_as(*tags, start=1)]
    [put] = [write for write in plan(None, records) if isinstance(write, PutTags)]
    expected = {("x", 1, 1, 0, 0)}
    counts = {"x": 1}
    for index, of_event in enumerate(tags):
        for tag in of_event:
            counts[tag] = counts.get(tag, 0) + 1
            expected.add((tag, counts[tag], index + 2, 1, index))
    assert {(row.tag, row.tag_seq_nr, row.seq_nr, row.offset, row.index) for row in put.rows} == expected
    assert len(put.rows) == len(expected)
    assert {(row.timestamp_ms, row.time_ms) for row in put.rows if row.offset == 1} == {(1000, 2000)}


def test_a_deleted_event_has_no_tag_row_unless_its_tag_is_not_cleared() -> None:
    records = [tagged_as({"x"}, {"x"}, {"x"}), *positioned(delete(2), start=1)]
    for clear_tags, left in ((True, [3]), (False, [1, 2, 3])):
        writes = plan_key(KEY, None, records, CONFIG, clear_tags=clear_tags)
        [put] = [write for write in writes if isinstance(write, PutTags)]
        assert [row.seq_nr for row in put.rows] == left
        [clear] = [write for write in writes if isinstance(write, ClearEvents)]
        assert [place.index for place in clear.unwritten] == ([0, 1] if clear_tags else [])
        assert clear.clear_tags is clear_tags


def test_tag_rows_and_topic_rows_are_event_rows_with_a_position_in_their_stream() -> None:
    [put] = [write for write in plan(None, [tagged_as({"x"}, {"x"}, start=3)]) if isinstance(write, PutTags)]
    row = put.rows[1]
    event = EventRow(2, row.encoded, 3000, Position(1, 3), 1, 6000)
    assert row.event == event
    assert row.place == TagPosition("x", 6000, "orders", 0, 3, 1, 1)
    assert (row.position, row.incarnation) == (Position(1, 3), Position(1, 3))
    of_topic = TopicRow(6000, 1, 3, "o-1", 2, 1, 3000, row.encoded)
    assert of_topic.event == event
    assert of_topic.place == TopicPosition(6000, 1, 3, "o-1", 2)


# ---- tag rows that are cleared before they are written


def tagged(count: int, start: int) -> list[PositionedAction]:
    events = [Event(n, tags={"even"} if n % 2 == 0 else ()) for n in range(count)]
    body = pack_events([encode_event(event) for event in events])
    return [PositionedAction(Position(1, start), 0, Append(1, b"i" * 16, count, body, tagged=encode_events(events)[1]))]


@pytest.mark.parametrize(("clear", "left"), [(purge(), [0, 2, 4]), (delete(3), [0, 2])], ids=["purge", "delete"])
def test_a_clear_names_the_tag_rows_that_its_slice_does_not_write(clear: Action, left: list[int]) -> None:
    """Another replicator may have written them, or may still do so; they are not found through event rows."""
    *_, write = plan(None, [*tagged(5, 0), *positioned(clear, start=1)])
    assert isinstance(write, ClearEvents | ClearJournal)
    assert write.clear_tags
    assert [(place.tag, place.index) for place in write.unwritten] == [("even", index) for index in left]


def test_a_purge_of_an_incarnation_without_tags_clears_no_tags() -> None:
    """Tag rows are found through all events of the journal, which may be many."""
    head = head_after(positioned(append(7)))
    [_, write] = plan(head, positioned(purge(), start=1))
    assert isinstance(write, ClearJournal)
    assert not write.clear_tags


def test_a_repeated_purge_clears_tags() -> None:
    """The grave does not record whether the journal had tags."""
    grave = head_after(records := [*tagged(5, 0), *positioned(purge(), start=1)])
    _, write = plan(grave, records)
    assert isinstance(write, ClearJournal)
    assert write.clear_tags


# ---- graves


PURGED_MS = 1_700_000_000_000
OLD_MS = PURGED_MS + GRAVE_RETENTION_MS + RECORD_LAG_MS_MAX + 1


@pytest.mark.parametrize(
    ("pointer", "log_start", "removable"),
    [
        (Pointer(Position(1, 9), OLD_MS), Position(1, 2), True),
        (Pointer(Position(1, 1), OLD_MS), Position(1, 2), True),
        (Pointer(Position(2, 0), OLD_MS), Position(2, 0), True),
        (None, Position(1, 2), False),
        (Pointer(Position(1, 0), OLD_MS), Position(1, 2), False),
        (Pointer(Position(1, 9), OLD_MS), Position(1, 1), False),
        (Pointer(Position(1, 9), OLD_MS - 1), Position(1, 2), False),
    ],
    ids=["old", "just replicated", "of an earlier epoch", "never", "not replicated", "still in the log", "young"],
)
def test_a_grave_is_removed_only_if_no_record_before_it_can_be_replayed(
    pointer: Pointer | None, log_start: Position, removable: bool
) -> None:
    head, _ = fold(None, placed_at(append(), 0), Position(1, 0), PURGED_MS, CONFIG)
    grave, _ = fold(head, purge(), Position(1, 1), PURGED_MS, CONFIG)
    assert head is not None
    assert grave is not None
    assert may_remove_grave(grave, pointer, log_start) is removable
    assert not may_remove_grave(head, pointer, log_start)
