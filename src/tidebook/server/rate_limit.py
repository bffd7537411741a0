"""A token bucket for each access token, or client without one, which limits requests per second and allows bursts."""

from __future__ import annotations

import time

from tidebook.api.errors import TooManyRequests

#: How many buckets are kept; full ones are forgotten first.
BUCKETS_MAX = 10_000


class RateLimit:
    """Counts requests; a rate of 0 means no limit."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        #: How many requests are left, and when they were counted.
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, who: str) -> None:
        """Count a request; raise `TooManyRequests` if there were too many."""
        if not self._per_s:
            return
        now_s = time.monotonic()
        left, at_s = self._buckets.get(who, (self._burst, now_s))
        left = min(self._burst, left + (now_s - at_s) * self._per_s)
        if left < 1.0:
            wait_s = (1.0 - left) / self._per_s
            raise TooManyRequests(
                f"more than {self._per_s:g} requests a second: wait {wait_s:.1f} s", retry_after_s=wait_s
            )
        if who not in self._buckets and len(self._buckets) >= BUCKETS_MAX:
            self._forget_full(now_s)
        self._buckets[who] = (left - 1.0, now_s)

    def _forget_full(self, now_s: float) -> None:
        full_s = self._burst / self._per_s
        kept = {who: bucket for who, bucket in self._buckets.items() if now_s - bucket[1] < full_s}
        while len(kept) >= BUCKETS_MAX:
            kept.pop(next(iter(kept)))
        self._buckets = kept
