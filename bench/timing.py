"""Functions that all benchmarks share: a stopwatch, percentiles, progress, and the result line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from bench.conditions import conditions


class Stopwatch:
    """The duration of the block that it timed, in seconds."""

    seconds = 0.0

    def rate(self, count: int) -> float:
        """Return the rate per second of `count` operations."""
        return count / self.seconds


@contextmanager
def timed(what: str) -> Iterator[Stopwatch]:
    """Time a block and print its progress on stderr."""
    watch = Stopwatch()
    print(f"  {what} …", end="", file=sys.stderr, flush=True)
    began = time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - began
        print(f" {watch.seconds:.3f} s", file=sys.stderr)


class Rounds:
    """Rates of several rounds by name; the median of each is reported, so that outliers have no effect."""

    def __init__(self) -> None:
        self._rates: dict[str, list[float]] = {}

    def add(self, name: str, rate: float) -> None:
        """Add the rate of one more round."""
        self._rates.setdefault(name, []).append(rate)

    def medians(self) -> dict[str, float]:
        """Return the median rate of each name."""
        return {name: median(rates) for name, rates in self._rates.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that the given share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(name: str, ratios: Mapping[str, float], figures: Mapping[str, Any], targets: Mapping[str, float]) -> None:
    """Print the result line: ratios by name, their targets, the figures they were computed from, and the conditions."""
    rounded = {key: round(value, 3) for key, value in ratios.items()}
    line = {"bench": name, **rounded, "targets": dict(targets), "figures": dict(figures), "conditions": conditions()}
    print(json.dumps(line))
