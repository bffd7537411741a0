"""Which segments may hold events: head and segment list together omit none, and skipped ones cost nothing."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidebook.core.action import Action
from tidebook.core.head import Head, Jump
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import (
    PositionedAction,
    PutHead,
    PutSegments,
    listed_between,
    plan_key,
    segments_between,
)
from tidebook.core.segments import event_segment
from tidebook.core.topic_config import TopicConfig
from tidebook.testing.action_histories import append, delete, placed_at

#: Each step skips some numbers and appends some events; a delete on no journal may precede them.
steps = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=6)


def build(reset: int, skips: list[tuple[int, int]], size: int, cut: int = 0) -> tuple[Head, set[int], set[int]]:
    """Replicate in two slices; return the head, the numbers of all events, and the listed segments."""
    config = TopicConfig(topic_id="t", partitions=1, segment_size=size)
    actions: list[Action] = [delete(reset)] if reset else []
    existing: set[int] = set()
    last = reset
    for skip, count in skips:
        first = last + 1 + skip
        last = first + count - 1
        actions.append(placed_at(append(count, at=first), len(actions)))
        existing |= set(range(first, last + 1))
    placed = [PositionedAction(Position(1, i), 0, action) for i, action in enumerate(actions)]
    head: Head | None = None
    listed: set[int] = set()
    for part in (placed[:cut], placed[cut:]):
        for write in plan_key(Key("t", "a"), head, part, config):
            if isinstance(write, PutSegments):
                listed |= {segment for each in write.segments for segment in each}
            elif isinstance(write, PutHead):
                head = write.head
    assert head is not None
    return head, existing, listed


def visited(head: Head, listed: set[int], above: int, to: int) -> list[int]:
    """Return the segments that a store reads."""
    found = [segment for segment in sorted(listed) if segment in listed_between(head, above, to)]
    return found + [segment for each in segments_between(head, above, to) for segment in each]


@given(st.integers(0, 20), steps, st.integers(1, 7), st.integers(0, 6), st.integers(0, 120), st.integers(0, 160))
@example(0, [(3, 1), (11, 1)], 5, 1, 0, 20)
def test_every_event_of_the_range_is_in_a_visited_segment(
    reset: int, skips: list[tuple[int, int]], size: int, cut: int, above: int, to: int
) -> None:
    head, existing, listed = build(reset, skips, size, cut)
    wanted = {event_segment(number, size) for number in existing if above < number <= to}
    assert wanted <= set(visited(head, listed, above, to))


@given(st.integers(0, 20), steps, st.integers(1, 7), st.integers(0, 6), st.integers(0, 120), st.integers(0, 160))
def test_segments_are_returned_once_in_order_and_within_the_range(
    reset: int, skips: list[tuple[int, int]], size: int, cut: int, above: int, to: int
) -> None:
    head, _, listed = build(reset, skips, size, cut)
    found = visited(head, listed, above, to)
    assert found == sorted(set(found))
    assert all(above // size <= segment <= (to - 1) // size for segment in found)


@given(st.integers(0, 20), steps, st.integers(1, 7), st.integers(0, 6))
def test_no_more_segments_are_visited_than_hold_events(
    reset: int, skips: list[tuple[int, int]], size: int, cut: int
) -> None:
    head, existing, listed = build(reset, skips, size, cut)
    occupied = {event_segment(number, size) for number in existing}
    # A journal that begins with a reset has a run from there, whether or not its first event is in that segment.
    assert occupied <= set(visited(head, listed, 0, head.seq_nr)) <= occupied | {reset // size}


def test_a_thousand_jumps_over_a_million_million_numbers_cost_a_thousand_segments() -> None:
    head, existing, listed = build(0, [(10**12, 1)] * 1000, 1000)
    assert visited(head, listed, 0, head.seq_nr) == sorted((number - 1) // 1000 for number in existing)


def test_gaps_that_an_earlier_version_kept_in_the_head_are_not_visited() -> None:
    head, _, _ = build(0, [(0, 3)], 1000)
    head = msgspec.structs.replace(head, seq_nr=10**15, jumps=(Jump(3, 10**15),))
    assert visited(head, set(), 0, head.seq_nr) == [0, (10**15 - 1) // 1000]


def test_an_empty_range_has_no_segments() -> None:
    head, _, listed = build(0, [(0, 9), (20, 1)], 5)
    assert visited(head, listed, 4, 4) == []
    assert visited(head, listed, 9, 4) == []


@given(
    st.lists(st.integers(1, 60), min_size=3, max_size=5, unique=True),
    st.integers(1, 7),
    st.integers(0, 70),
    st.integers(0, 70),
)
@example([1, 11, 12], 5, 0, 70)
@example([1, 40, 60], 5, 0, 7)
def test_only_segments_with_possible_events_are_visited_between_the_gaps_of_an_earlier_version(
    numbers: list[int], size: int, above: int, to: int
) -> None:
    """A gap hides only the segments that it covers completely."""
    numbers.sort()
    head, _, _ = build(0, [(0, 1)], size)
    # An earlier version kept a gap only if it skipped a segment.
    pairs = pairwise(numbers)
    jumps = tuple(Jump(last, next_) for last, next_ in pairs if (next_ - 1) // size > (last - 1) // size + 1)
    head = msgspec.structs.replace(head, seq_nr=numbers[-1], jumps=jumps)
    hidden = {n for jump in jumps for n in range(jump.last + 1, jump.next)}
    to = min(to, numbers[-1])
    reach = range(above // size, (to - 1) // size + 1) if to > above else range(0)
    possible = {segment for segment in reach if not set(range(segment * size + 1, (segment + 1) * size + 1)) <= hidden}
    assert visited(head, set(), above, to) == sorted(possible)


@pytest.mark.parametrize(
    ("above", "to", "listed"),
    [
        (0, 5, range(1)),
        (0, 6, range(2)),
        (4, 10, range(2)),
        (5, 10, range(1, 2)),
        (5, 11, range(1, 3)),
        (14, 1_000, range(2, 19)),  # the head's last run begins there
        (7, 7, range(0)),
        (9, 7, range(0)),
    ],
)
def test_listed_segments_reach_from_the_first_event_to_the_last_or_to_the_last_run(
    above: int, to: int, listed: range
) -> None:
    head, _, _ = build(0, [(0, 9), (85, 10)], 5)
    assert head.run_start == 18
    assert listed_between(msgspec.structs.replace(head, run_start=19), above, to) == listed
