"""Which segments may hold events: none with an event is left out, and no jump is walked."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tidebook.core.fold import fold
from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.replication import segments_between
from tidebook.core.segments import event_segment
from tidebook.core.topic import TopicFacts
from tidebook.testing.histories import append, delete, placed_at

#: Each step skips some numbers and appends some; a first reset may come before.
steps = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=6)


def build(reset: int, skips: list[tuple[int, int]], size: int) -> tuple[Head, set[int]]:
    """A head, and all the numbers that its events have."""
    facts = TopicFacts(topic_id="t", partitions=1, segment_size=size)
    head, there, offset = None, set(), 0
    if reset:
        head, _ = fold(None, delete(reset), Position(1, 0), 0, facts)
        offset = 1
    for skip, count in skips:
        first = (head.seq_nr if head is not None else 0) + 1 + skip
        head, _ = fold(head, placed_at(append(count, at=first), offset), Position(1, offset), 0, facts)
        there |= set(range(first, first + count))
        offset += 1
    assert head is not None
    return head, there


@given(st.integers(0, 20), steps, st.integers(1, 7), st.integers(0, 120), st.integers(0, 160))
@example(0, [(3, 1), (11, 1)], 5, 0, 20)
def test_every_event_in_the_range_lies_in_a_segment_that_is_visited(
    reset: int, skips: list[tuple[int, int]], size: int, above: int, to: int
) -> None:
    head, there = build(reset, skips, size)
    wanted = {event_segment(number, size) for number in there if above < number <= to}
    visited = [segment for each in segments_between(head, above, to) for segment in each]
    assert wanted <= set(visited)


@given(st.integers(0, 20), steps, st.integers(1, 7), st.integers(0, 120), st.integers(0, 160))
def test_segments_come_once_in_order_and_within_the_range(
    reset: int, skips: list[tuple[int, int]], size: int, above: int, to: int
) -> None:
    head, _ = build(reset, skips, size)
    visited = [segment for each in segments_between(head, above, to) for segment in each]
    assert visited == sorted(set(visited))
    assert all(above // size <= segment <= (to - 1) // size for segment in visited)


@given(st.integers(0, 20), steps, st.integers(1, 7))
def test_a_segment_that_a_jump_passed_over_is_not_visited(reset: int, skips: list[tuple[int, int]], size: int) -> None:
    head, _ = build(reset, skips, size)
    passed = set()
    for jump in head.jumps:
        empty = range(jump.last + 1, jump.next)
        passed |= {
            segment
            for segment in range(head.seq_nr // size + 1)
            if segment * size + 1 >= empty.start and (segment + 1) * size <= empty.stop - 1
        }
    visited = {segment for each in segments_between(head, 0, head.seq_nr) for segment in each}
    assert not passed & visited


def test_a_jump_over_a_million_million_numbers_costs_nothing() -> None:
    head, _ = build(0, [(0, 3), (10**15, 1)], 1000)
    ranges = segments_between(head, 0, head.seq_nr)
    assert [list(each) for each in ranges] == [[0], [(head.seq_nr - 1) // 1000]]


def test_an_empty_range_has_no_segments() -> None:
    head, _ = build(0, [(0, 9)], 5)
    assert segments_between(head, 4, 4) == []
    assert segments_between(head, 9, 4) == []
