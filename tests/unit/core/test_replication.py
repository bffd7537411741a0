"""What a replicator writes for one key: which writes, in which order, and what it repeats after a crash."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tidebook.core.action import Action, Append, Damaged, Mark, Purge
from tidebook.core.fold import fold
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication import (
    ClearEvents,
    ClearJournal,
    Placed,
    PutEvents,
    PutHead,
    Write,
    advance_time,
    plan_key,
)
from tidebook.core.topic import TopicFacts
from tidebook.testing.histories import append, delete, placed_at, purge

FACTS = TopicFacts(topic_id="t", partitions=1, segment_size=5)
KEY = Key("orders", "o-1")


def placed(*actions: Action | Damaged, start: int = 0) -> list[Placed]:
    return [
        Placed(Position(1, offset), 1000 * offset, placed_at(action, offset) if isinstance(action, Append) else action)
        for offset, action in enumerate(actions, start)
    ]


def head_after(records: Sequence[Placed]) -> Head:
    head = None
    for record in records:
        head, _ = fold(head, record.action, record.position, record.timestamp_ms, FACTS)
    assert head is not None
    return head


def plan(head: Head | None, records: Sequence[Placed]) -> tuple[Write, ...]:
    return plan_key(KEY, head, records, FACTS)


def kinds(writes: Sequence[Write]) -> list[type]:
    return [type(write) for write in writes]


def numbers(write: Write) -> list[int]:
    assert isinstance(write, PutEvents)
    return [row.seq_nr for row in write.rows]


def test_rows_come_before_the_head_that_tells_of_them() -> None:
    records = placed(append(2))
    writes = plan(None, records)
    assert kinds(writes) == [PutEvents, PutHead]
    assert numbers(writes[0]) == [1, 2]
    assert writes[1].head == head_after(records)


def test_a_row_knows_its_record_and_its_place_in_it() -> None:
    (events, _) = plan(None, placed(Mark(1), append(2)))
    assert isinstance(events, PutEvents)
    assert [(row.position, row.index, row.timestamp_ms) for row in events.rows] == [
        (Position(1, 1), 0, 1000),
        (Position(1, 1), 1, 1000),
    ]


def test_a_deletes_tombstones_come_after_the_head() -> None:
    writes = plan(None, placed(append(3), delete(2)))
    assert kinds(writes) == [PutEvents, PutHead, ClearEvents]


def test_what_a_delete_of_the_same_slice_removes_is_never_written() -> None:
    assert numbers(plan(None, placed(append(3), delete(2)))[0]) == [3]


def test_a_delete_of_all_writes_no_rows() -> None:
    assert kinds(plan(None, placed(append(3), delete(3)))) == [PutHead, ClearEvents]


def test_a_delete_clears_only_above_what_was_cleared_before() -> None:
    head = head_after(placed(append(9), delete(4)))
    (_, clear) = plan(head, placed(delete(8), start=2))
    assert isinstance(clear, ClearEvents)
    assert (clear.above, clear.head.delete_to) == (4, 8)


def test_the_tombstone_of_a_delete_is_bounded_by_the_number_so_far() -> None:
    writes = plan(None, placed(append(3), delete(99)))
    assert writes[-1].head.delete_to == 3


@pytest.mark.parametrize("action", [Mark(1), purge(), append(expected=9), Damaged("x")], ids=repr)
def test_what_changes_nothing_writes_nothing(action: Action | Damaged) -> None:
    assert plan(None, placed(action)) == ()


def test_a_purge_writes_the_grave_and_then_clears() -> None:
    head = head_after(placed(append(7)))
    writes = plan(head, placed(purge(), start=1))
    assert kinds(writes) == [PutHead, ClearJournal]
    assert not writes[0].head.live
    assert writes[1].head == writes[0].head


def test_a_purge_splits_the_work_so_that_the_next_life_waits_for_the_tombstones() -> None:
    head = head_after(placed(append(7)))
    writes = plan(head, placed(append(), purge(), append(2), start=1))
    assert kinds(writes) == [PutHead, ClearJournal, PutEvents, PutHead]
    assert numbers(writes[2]) == [1, 2]


def test_a_journal_created_and_purged_in_one_slice_still_writes_its_grave() -> None:
    assert kinds(plan(None, placed(append(2), purge()))) == [PutHead, ClearJournal]


def test_a_delete_before_a_purge_of_the_same_slice_needs_no_tombstone_of_its_own() -> None:
    assert kinds(plan(None, placed(append(2), delete(1), purge()))) == [PutHead, ClearJournal]


def test_a_delete_in_the_next_life_clears_from_its_start() -> None:
    head = head_after(placed(append(9), delete(8)))
    clear = plan(head, placed(purge(), append(6), delete(3), start=2))[-1]
    assert isinstance(clear, ClearEvents)
    assert (clear.above, clear.head.delete_to) == (0, 3)


def test_a_conditional_purge_that_fails_writes_nothing() -> None:
    head = head_after(placed(append(2), append()))
    assert plan(head, placed(Purge(1, Position(1, 0)), start=2)) == ()


# ---- replays


def test_records_that_the_head_contains_are_not_folded_twice() -> None:
    records = placed(append(2), append())
    head = head_after(records)
    assert plan(head, records) == (PutHead(KEY, head),)


def test_a_skipped_record_makes_the_head_be_written_again_as_it_was_read() -> None:
    records = placed(append(2), append())
    head = head_after(records[:1])
    writes = plan(head, records)
    assert writes[0] == PutHead(KEY, head)
    assert kinds(writes[1:]) == [PutEvents, PutHead]


def test_a_skipped_delete_is_cleared_again_from_the_first_segment() -> None:
    records = placed(append(9), delete(4), delete(6))
    head = head_after(records)
    assert plan(head, records) == (PutHead(KEY, head), ClearEvents(KEY, head, 0))


def test_a_skipped_purge_is_cleared_again_before_the_next_life() -> None:
    records = placed(append(2), purge(), append())
    grave = head_after(records[:2])
    writes = plan(grave, records)
    assert writes[:2] == (PutHead(KEY, grave), ClearJournal(KEY, grave))
    assert kinds(writes[2:]) == [PutEvents, PutHead]


def test_a_skipped_mark_makes_the_head_be_written_again_too() -> None:
    head = head_after(placed(append(), Mark(1), append()))
    assert plan(head, placed(Mark(1), start=1)) == (PutHead(KEY, head),)


def test_a_slice_that_begins_behind_the_head_repeats_nothing() -> None:
    head = head_after(placed(append(9), delete(4)))
    assert kinds(plan(head, placed(append(), start=2))) == [PutEvents, PutHead]


# ---- the log's time


def test_the_time_of_the_log_never_goes_back() -> None:
    assert advance_time(45, 50, Mark(1)) == 50
    assert advance_time(60, 50, Mark(1)) == 60


def test_a_tick_moves_the_time_on() -> None:
    assert advance_time(0, 40, Mark(1, 70)) == 70
