"""The history of bucket sizes: the bounds of buckets, and which changes are refused."""

from __future__ import annotations

import pytest

from tidebook.core.buckets import (
    FIXED_AHEAD_MS,
    SIZES_MS,
    Buckets,
    BucketSizeChange,
    decode_buckets,
    encode_buckets,
)
from tidebook.core.errors import Corrupt, InvalidInput

DAY, HOUR, MINUTE = SIZES_MS["day"], SIZES_MS["hour"], SIZES_MS["minute"]
#: Hours, then minutes from the middle of the fourth hour on, then days from the middle of a minute on.
CHANGED = Buckets(
    (
        BucketSizeChange(0, "hour"),
        BucketSizeChange(3 * HOUR + HOUR // 2, "minute"),
        BucketSizeChange(5 * HOUR + 30_000, "day"),
    )
)


@pytest.mark.parametrize(
    ("time_ms", "span"),
    [
        (0, (0, HOUR)),
        (HOUR - 1, (0, HOUR)),
        (HOUR, (HOUR, 2 * HOUR)),
        (3 * HOUR, (3 * HOUR, 3 * HOUR + HOUR // 2)),  # it ends at the change
        (3 * HOUR + HOUR // 2 - 1, (3 * HOUR, 3 * HOUR + HOUR // 2)),
        (3 * HOUR + HOUR // 2, (3 * HOUR + HOUR // 2, 3 * HOUR + HOUR // 2 + MINUTE)),
        (5 * HOUR, (5 * HOUR, 5 * HOUR + 30_000)),
        (5 * HOUR + 30_000, (5 * HOUR + 30_000, DAY)),  # it begins at the change
        (DAY, (DAY, 2 * DAY)),
    ],
)
def test_a_bucket_spans_its_size_or_less_at_a_change(time_ms: int, span: tuple[int, int]) -> None:
    assert CHANGED.span(time_ms) == span
    assert CHANGED.start(time_ms) == span[0]


@pytest.mark.parametrize(
    ("time_ms", "before"),
    [
        (0, 0),
        (HOUR - 1, 0),
        (HOUR, 0),
        (2 * HOUR + 5, HOUR),
        (3 * HOUR + HOUR // 2, 3 * HOUR),
        (DAY, 5 * HOUR + 30_000),
    ],
)
def test_the_bucket_before_ends_where_this_one_begins(time_ms: int, before: int) -> None:
    assert CHANGED.before(time_ms) == before


def test_no_bucket_comes_before_the_first_one_however_short_it_is() -> None:
    assert Buckets((BucketSizeChange(0, "hour"), BucketSizeChange(1, "day"))).before(0) == 0


def test_the_fixed_part_extends_past_written_rows_and_never_shrinks() -> None:
    fixed = Buckets().fixed(1_000)
    assert fixed.fixed_ms == 1_000 + FIXED_AHEAD_MS
    assert fixed.fixed(500).fixed_ms == fixed.fixed_ms
    assert CHANGED.fixed_ms == 5 * HOUR + 30_000
    assert CHANGED.fixed(1).changes == (
        *CHANGED.changes[:2],
        BucketSizeChange(5 * HOUR + 30_000, "day", 5 * HOUR + 30_000),
    )


def test_a_change_must_be_after_the_last_one_and_not_within_the_fixed_part() -> None:
    fixed = Buckets().fixed(0)
    assert fixed.changed("day", from_ms=FIXED_AHEAD_MS).changes[-1] == BucketSizeChange(FIXED_AHEAD_MS, "day")
    for buckets, from_ms in ((fixed, FIXED_AHEAD_MS - 1), (Buckets(), 0), (CHANGED, 5 * HOUR + 30_000)):
        with pytest.raises(InvalidInput, match=f"a change at {from_ms}"):
            buckets.changed("day", from_ms=from_ms)
    with pytest.raises(InvalidInput, match="one of day, hour"):
        Buckets().changed("week", from_ms=DAY)


def test_a_stored_history_is_read_as_it_was_written() -> None:
    assert decode_buckets(encode_buckets(CHANGED)) == CHANGED


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '[[0,"week"]]', '[[0,"hour"],[5,"week"]]', '[[5,"hour"],[0,"day"]]', '[[5,"hour"],[5,"day"]]'],
)
def test_a_damaged_history_is_corrupt(text: str) -> None:
    with pytest.raises(Corrupt):
        decode_buckets(text)
