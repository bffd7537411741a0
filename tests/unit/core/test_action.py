"""Actions: the expiry that an append carries."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tidebook.core.action import NEVER, expiry_ms
from tidebook.core.bounds import NUMBER_MAX
from tidebook.core.errors import InvalidInput


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        (None, None),
        (NEVER, NEVER),
        (timedelta(milliseconds=1), 1),
        (timedelta(microseconds=1_999), 1),
        (timedelta(days=30), 30 * 86_400_000),
        (timedelta(milliseconds=NUMBER_MAX), NUMBER_MAX),
    ],
)
def test_an_expiry_is_kept_in_whole_milliseconds(given: timedelta | int | None, ms: int | None) -> None:
    assert expiry_ms(given) == ms


@pytest.mark.parametrize(
    "given",
    [timedelta(0), timedelta(microseconds=999), timedelta(days=-1), timedelta(milliseconds=NUMBER_MAX + 1)],
    ids=repr,
)
def test_an_expiry_below_a_millisecond_or_above_the_greatest_number_is_refused(given: timedelta) -> None:
    with pytest.raises(InvalidInput, match="from 1 to"):
        expiry_ms(given)


@pytest.mark.parametrize("given", [1, 5_000, -1, False, True, 1.5, "1 day"], ids=repr)
def test_an_expiry_that_is_no_duration_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match="timedelta"):
        expiry_ms(given)  # type: ignore[arg-type]
