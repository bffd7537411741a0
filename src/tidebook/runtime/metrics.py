"""Counters, gauges and durations of a book, which `/metrics` and `status` report."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """One value of one metric with its labels."""

    name: str
    labels: Labels
    value: float


class Timing(msgspec.Struct):
    """The durations of one operation: their number, sum and maximum."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)


class Metrics:
    """The registry of metrics of one book. It is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._timings: dict[tuple[str, Labels], Timing] = {}

    def count(self, name: str, n: float = 1, **labels: object) -> None:
        """Add to a counter."""
        key = (name, _labels(labels))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + n

    def gauge(self, name: str, value: float, **labels: object) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[name, _labels(labels)] = value

    def time(self, name: str, seconds: float, **labels: object) -> None:
        """Add a duration."""
        key = (name, _labels(labels))
        with self._lock:
            timing = self._timings.get(key)
            if timing is None:
                timing = self._timings[key] = Timing()
            timing.add(seconds)

    def counted(self, name: str, **labels: object) -> float:
        """Return the sum of a counter over all label sets that contain `labels`."""
        wanted = set(_labels(labels))
        with self._lock:
            return sum(v for (n, have), v in self._counts.items() if n == name and wanted <= set(have))

    def timing(self, name: str, **labels: object) -> Timing:
        """Return the durations of an operation so far."""
        with self._lock:
            return self._timings.get((name, _labels(labels)), Timing())

    def samples(self) -> Iterator[Sample]:
        """Yield all values; a duration has the samples `_count`, `_seconds_total` and `_seconds_max`."""
        with self._lock:
            plain = [*self._counts.items(), *self._gauges.items()]
            timings = [(key, t.count, t.total_s, t.max_s) for key, t in self._timings.items()]
        for (name, labels), value in plain:
            yield Sample(name, labels, value)
        for (name, labels), count, total_s, max_s in timings:
            yield Sample(f"{name}_count", labels, count)
            yield Sample(f"{name}_seconds_total", labels, total_s)
            yield Sample(f"{name}_seconds_max", labels, max_s)


def _labels(labels: dict[str, object]) -> Labels:
    if len(labels) < 2:  # the usual case, on the hot path of every counter
        return tuple([(name, str(value)) for name, value in labels.items()])
    return tuple(sorted((name, str(value)) for name, value in labels.items()))
