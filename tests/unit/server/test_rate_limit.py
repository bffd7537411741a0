"""The token bucket of the rate limit."""

from __future__ import annotations

import pytest

from tidebook.api.errors import TooManyRequests
from tidebook.server import rate_limit
from tidebook.server.rate_limit import RateLimit


def test_a_burst_is_allowed_and_then_the_rate_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tidebook.server.rate_limit.time.monotonic", lambda: now[0])
    limit = RateLimit(2.0, 3)
    for _ in range(3):
        limit.take("a")
    with pytest.raises(TooManyRequests) as refused:
        limit.take("a")
    assert refused.value.retry_after_s == pytest.approx(0.5)
    limit.take("b")  # others are not affected
    now[0] += 0.5
    limit.take("a")
    with pytest.raises(TooManyRequests):
        limit.take("a")


def test_a_rate_of_zero_is_no_limit() -> None:
    limit = RateLimit(0.0, 1)
    for _ in range(100):
        limit.take("a")


def test_the_number_of_buckets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "BUCKETS_MAX", 10)
    limit = RateLimit(1.0, 5)
    for n in range(100):
        limit.take(str(n))
    assert len(limit._buckets) <= 10
