"""The growing pause between retries."""

from __future__ import annotations

import pytest

from tidebook.runtime.backoff import Backoff


def test_the_pause_doubles_up_to_its_limit() -> None:
    backoff = Backoff(first_s=0.5, max_s=3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_reset_starts_again_from_the_first_pause() -> None:
    backoff = Backoff(first_s=1.0, max_s=8.0)
    backoff.next_s()
    backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_the_factor_can_be_chosen() -> None:
    backoff = Backoff(first_s=1.0, max_s=100.0, factor=1.5)
    assert [backoff.next_s() for _ in range(3)] == pytest.approx([1.0, 1.5, 2.25])
