"""What every benchmark shares: a stopwatch, percentiles, progress, and the closing line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any


class Stopwatch:
    """Seconds of the block that it timed."""

    seconds = 0.0

    def rate(self, count: int) -> float:
        """How many a second."""
        return count / self.seconds


@contextmanager
def timed(what: str) -> Iterator[Stopwatch]:
    """Time a block and say so on stderr."""
    watch = Stopwatch()
    print(f"  {what} …", end="", file=sys.stderr, flush=True)
    began = time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - began
        print(f" {watch.seconds:.3f} s", file=sys.stderr)


class Rounds:
    """Rates of several rounds by name. Of every side of a ratio the median counts, so that no side has the luck."""

    def __init__(self) -> None:
        self._rates: dict[str, list[float]] = {}

    def add(self, name: str, rate: float) -> None:
        """The rate of one more round."""
        self._rates.setdefault(name, []).append(rate)

    def medians(self) -> dict[str, float]:
        """What counts of each, as soon as it has a round."""
        return {name: median(rates) for name, rates in self._rates.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(name: str, ratios: Mapping[str, float], figures: Mapping[str, Any], targets: Mapping[str, float]) -> None:
    """The closing line: ratios by name, what they were made from, and what was asked for."""
    rounded = {key: round(value, 3) for key, value in ratios.items()}
    print(json.dumps({"bench": name, **rounded, "targets": dict(targets), "figures": dict(figures)}))
