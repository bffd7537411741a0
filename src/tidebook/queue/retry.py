"""The retry policy of a worker: how long a failed entry waits."""

from __future__ import annotations

import math
import random

import msgspec

from tidebook.core.errors import InvalidInput


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """An exponential backoff with a limit and jitter, so that entries that failed together are not retried together."""

    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 3_600.0
    #: The part of the delay that is random, 0 to 1.
    spread: float = 0.2

    def __post_init__(self) -> None:
        values = (self.first_s, self.factor, self.longest_s, self.spread)
        numbers = all(type(value) in (int, float) and math.isfinite(value) for value in values)
        if not numbers or not (0 <= self.first_s <= self.longest_s and self.factor >= 1 and 0 <= self.spread <= 1):
            raise InvalidInput(f"{self!r} is not a retry policy: delays grow from first_s to longest_s")

    def delay_s(self, timeouts: int) -> float:
        """Return the delay after a failure; `timeouts` is how many times the entry failed before."""
        try:
            delay_s = min(self.first_s * self.factor**timeouts, self.longest_s)
        except OverflowError:
            delay_s = self.longest_s
        return delay_s * (1 - self.spread * random.random())
