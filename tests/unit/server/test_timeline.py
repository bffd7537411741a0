"""The timeline of a journal counts every event once, whichever of its events were read."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tidebook.server.console.timeline import BARS, SAMPLES_MAX, Point, sampled_numbers, timeline_of

POINTS = st.lists(st.tuples(st.integers(1, 50), st.integers(-5, 100_000)), min_size=2, max_size=40)


@given(POINTS)
@example([(1, 0), (1, -1), (1, 2)])
def test_all_bars_together_have_all_events(steps: list[tuple[int, int]]) -> None:
    points, number, time_ms = list[Point](), 0, 1_000
    for by, later_ms in steps:
        number, time_ms = number + by, time_ms + later_ms
        points.append(Point(number, time_ms))
    found = timeline_of(points, exact=False)
    if found is None:
        assert len({each.time_ms for each in points}) == 1
        return
    assert len(found.bars) == BARS
    assert round(sum(bar.events for bar in found.bars)) == points[-1].number - points[0].number + 1
    assert max(bar.share for bar in found.bars) == 1


def test_known_events_are_in_the_bars_of_their_times() -> None:
    found = timeline_of([Point(1, 0), Point(2, 10), Point(3, BARS * 10)], exact=True)
    assert found is not None
    assert [(n, bar.events) for n, bar in enumerate(found.bars) if bar.events] == [(0, 1), (1, 1), (BARS - 1, 1)]


def test_unknown_events_are_spread_between_the_known_ones() -> None:
    found = timeline_of([Point(1, 0), Point(1 + BARS, BARS * 10)], exact=False)
    assert found is not None
    assert {round(bar.events, 6) for bar in found.bars[1:]} == {1}


@given(st.integers(1, 10**9), st.integers(-1, 10**9))
def test_few_numbers_are_read_and_the_ends_are_among_them(first: int, more: int) -> None:
    numbers = sampled_numbers(first, first + more)
    assert len(numbers) == min(SAMPLES_MAX, more + 1)
    assert numbers == sorted(set(numbers))
    if numbers:
        assert (numbers[0], numbers[-1]) == (first, first + more)
