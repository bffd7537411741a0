"""Counts, gauges and durations that a part keeps of itself; `/metrics` and `status` show them, tests assert them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """One value of one metric."""

    name: str
    labels: Labels
    value: float


class Timing(msgspec.Struct):
    """Durations of one operation: how many, how long together, and how they are spread over powers of two."""

    count: int = 0
    total_s: float = 0.0
    most_s: float = 0.0
    buckets: dict[int, int] = msgspec.field(default_factory=dict)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.most_s = max(self.most_s, seconds)
        bucket = math.frexp(seconds)[1] if seconds > 0 else -30
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1


class Metrics:
    """A small registry without a global: each book has its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._timings: dict[tuple[str, Labels], Timing] = {}

    def count(self, name: str, n: float = 1, **labels: object) -> None:
        """Add to a counter."""
        at = (name, _labels(labels))
        with self._lock:
            self._counts[at] = self._counts.get(at, 0) + n

    def gauge(self, name: str, value: float, **labels: object) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[name, _labels(labels)] = value

    def time(self, name: str, seconds: float, **labels: object) -> None:
        """Add a duration."""
        at = (name, _labels(labels))
        with self._lock:
            timing = self._timings.get(at)
            if timing is None:
                timing = self._timings[at] = Timing()
            timing.add(seconds)

    def counted(self, name: str, **labels: object) -> float:
        """The value of a counter, over all label sets that contain `labels`."""
        wanted = set(_labels(labels))
        with self._lock:
            return sum(v for (n, have), v in self._counts.items() if n == name and wanted <= set(have))

    def timing(self, name: str, **labels: object) -> Timing:
        """The durations of an operation so far."""
        with self._lock:
            return self._timings.get((name, _labels(labels)), Timing())

    def samples(self) -> Iterator[Sample]:
        """All values, timings as `_count`, `_seconds_total` and `_seconds_max`."""
        with self._lock:
            plain = [*self._counts.items(), *self._gauges.items()]
            timings = [(at, t.count, t.total_s, t.most_s) for at, t in self._timings.items()]
        for (name, labels), value in plain:
            yield Sample(name, labels, value)
        for (name, labels), count, total_s, most_s in timings:
            yield Sample(f"{name}_count", labels, count)
            yield Sample(f"{name}_seconds_total", labels, total_s)
            yield Sample(f"{name}_seconds_max", labels, most_s)


def _labels(labels: dict[str, object]) -> Labels:
    if len(labels) < 2:  # nearly always, and counted all the time
        return tuple([(name, str(value)) for name, value in labels.items()])
    return tuple(sorted((name, str(value)) for name, value in labels.items()))
