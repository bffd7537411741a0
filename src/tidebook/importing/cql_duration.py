"""Durations as Cassandra writes them."""

from __future__ import annotations

import re
from datetime import timedelta

from tidebook.core.errors import Corrupt

#: A month has no fixed length; kafka-journal itself writes days and nanoseconds only.
_UNITS_S = {
    "y": 365 * 86_400.0, "mo": 30 * 86_400.0, "w": 7 * 86_400.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0,
    "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9,
}  # fmt: skip
_PART = re.compile(r"(\d+)(mo|ms|us|µs|ns|y|w|d|h|m|s)")


def parse_duration(text: str) -> timedelta:
    """Return the length of a CQL duration; a month counts as 30 days, and a year as 365.

    >>> parse_duration("1d2h")
    datetime.timedelta(days=1, seconds=7200)
    """
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise Corrupt(f"{text[:40]!r} is not a duration such as 1d2h")
    return timedelta(seconds=sum(int(number) * _UNITS_S[unit] for number, unit in parts))
