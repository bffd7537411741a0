"""The growing pause between retries."""

from __future__ import annotations

#: After this many pauses the pause grows no further: a higher power of the factor could overflow.
PAUSES_MAX = 200


class Backoff:
    """Computes the pause before each retry: `first_s`, then `factor` times the previous pause, at most `max_s`.

    >>> backoff = Backoff(first_s=0.1, max_s=0.3)
    >>> [round(backoff.next_s(), 1) for _ in range(4)]
    [0.1, 0.2, 0.3, 0.3]
    """

    __slots__ = ("_factor", "_first_s", "_max_s", "_pauses")

    def __init__(self, *, first_s: float, max_s: float, factor: float = 2.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._factor = factor
        self._pauses = 0

    def next_s(self) -> float:
        """Return how many seconds to wait before the next attempt, and increase the pause after that."""
        pause_s = self.pause_s(self._pauses)
        self._pauses += 1
        return pause_s

    def pause_s(self, pauses: int) -> float:
        """Return how many seconds to wait after this many pauses; for callers that count the pauses themselves."""
        return min(self._first_s * self._factor ** min(pauses, PAUSES_MAX), self._max_s)

    def reset(self) -> None:
        """Start again from the first pause. Call this after a successful attempt."""
        self._pauses = 0
