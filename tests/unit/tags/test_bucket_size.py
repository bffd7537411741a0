"""Buckets of tag views: their starts and spans in any history of sizes, and its fixed part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.buckets import FIXED_AHEAD_MS, SIZES_MS, Buckets, BucketSizeChange, decode_buckets, encode_buckets
from tidebook.core.errors import Corrupt, InvalidInput

HOUR, DAY = SIZES_MS["hour"], SIZES_MS["day"]


def histories() -> st.SearchStrategy[Buckets]:
    later = st.lists(
        st.tuples(st.integers(1, 10 * DAY), st.sampled_from(sorted(SIZES_MS))), max_size=4, unique_by=lambda c: c[0]
    )
    first = st.sampled_from(sorted(SIZES_MS))
    return st.builds(
        lambda size, rest: Buckets((BucketSizeChange(0, size), *(BucketSizeChange(*each) for each in sorted(rest)))),
        first,
        later,
    )


def test_a_bucket_is_named_by_its_start() -> None:
    assert Buckets().start(3 * HOUR + 5) == 3 * HOUR
    assert Buckets((BucketSizeChange(0, "day"),)).start(DAY + HOUR) == DAY


def test_a_larger_size_starts_a_new_bucket_where_it_takes_effect() -> None:
    buckets = Buckets().changed("day", from_ms=10 * HOUR + 7)
    assert buckets.start(10 * HOUR + 6) == 10 * HOUR
    assert buckets.start(10 * HOUR + 7) == 10 * HOUR + 7
    assert buckets.start(DAY) == DAY


@given(histories(), st.lists(st.integers(0, 12 * DAY), min_size=2, max_size=20))
def test_buckets_of_increasing_times_never_decrease_and_never_begin_after_their_times(
    buckets: Buckets, times: list[int]
) -> None:
    starts = [buckets.start(time) for time in sorted(times)]
    assert starts == sorted(starts)
    assert all(start <= time for start, time in zip(starts, sorted(times), strict=True))


@given(histories(), st.integers(0, 12 * DAY))
def test_the_span_of_a_bucket_holds_exactly_its_times(buckets: Buckets, time: int) -> None:
    begin, end = buckets.span(time)
    assert begin <= time < end
    assert buckets.start(begin) == buckets.start(end - 1) == buckets.start(time) == begin
    assert buckets.start(end) == end


@given(histories())
def test_a_history_survives_encoding(buckets: Buckets) -> None:
    assert decode_buckets(encode_buckets(buckets)) == buckets


def test_an_unknown_size_or_an_earlier_change_is_refused() -> None:
    with pytest.raises(InvalidInput):
        Buckets().changed("week", from_ms=5)
    with pytest.raises(InvalidInput):
        Buckets((BucketSizeChange(0, "day"), BucketSizeChange(50, "hour"))).changed("minute", from_ms=50)


def test_no_change_starts_within_the_fixed_part() -> None:
    buckets = Buckets().fixed(DAY)
    assert buckets.fixed_ms == DAY + FIXED_AHEAD_MS
    with pytest.raises(InvalidInput):
        buckets.changed("minute", from_ms=buckets.fixed_ms - 1)
    later = buckets.changed("minute", from_ms=buckets.fixed_ms)
    assert later.fixed_ms == later.changes[-1].from_ms, "the fixed part ends at the change"


@given(histories(), st.integers(0, 12 * DAY), st.integers(0, 12 * DAY))
def test_the_fixed_part_keeps_its_buckets_whatever_changes_later(buckets: Buckets, fixed_at: int, time: int) -> None:
    fixed = buckets.fixed(fixed_at)
    assert fixed.fixed_ms > fixed_at
    assert fixed.fixed(fixed_at // 2) == fixed, "the fixed part never decreases"
    changed = fixed.changed("minute", from_ms=fixed.fixed_ms + 1)
    below = min(time, fixed.fixed_ms - 1)
    assert changed.start(below) == fixed.start(below) == buckets.start(below)
    assert decode_buckets(encode_buckets(changed)) == changed


def test_a_history_of_an_older_tidebook_has_no_fixed_part() -> None:
    assert decode_buckets('[[0,"day"],[50,"hour"]]') == Buckets(
        (BucketSizeChange(0, "day"), BucketSizeChange(50, "hour"))
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '[[0,"week"]]', "null"])
def test_a_damaged_history_is_reported(text: str) -> None:
    with pytest.raises(Corrupt):
        decode_buckets(text)
