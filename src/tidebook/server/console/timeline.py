"""The timeline of a journal: the number of events in each part of its time, estimated from a few events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.store.port import StoreWriter

#: How many events are read; of a longer journal the timeline is an estimate.
SAMPLES_MAX: Final = 33
BARS: Final = 48


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the time."""

    from_ms: int
    events: float
    #: The number of events relative to the largest bar, from 0 to 1.
    share: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The time between the first and the last stored event, in parts of the same length."""

    from_ms: int
    to_ms: int
    bars: list[Bar]
    exact: bool


class Point(msgspec.Struct, frozen=True):
    """The number of an event and its time."""

    number: int
    time_ms: int


async def read_timeline(store: StoreWriter, key: Key, head: Head) -> Timeline | None:
    """Return the timeline of the replicated events of a journal; None if no two of them have different times."""
    stored = await store.head(key)
    if stored is None or stored.incarnation != head.incarnation:
        return None
    first, last = head.delete_to + 1, min(head.seq_nr, stored.seq_nr)
    pages = await asyncio.gather(
        *(store.events(key, stored, after=number - 1, to=last, limit=1) for number in sampled_numbers(first, last))
    )
    found = {row.seq_nr: row.timestamp_ms for page in pages for row in page}
    return timeline_of([Point(*each) for each in sorted(found.items())], exact=last - first < SAMPLES_MAX)


def sampled_numbers(first: int, last: int) -> list[int]:
    """Return up to `SAMPLES_MAX` numbers at equal distances, the first and the last among them."""
    count = min(SAMPLES_MAX, last - first + 1)
    if count < 2:
        return [first] * max(0, count)
    return [first + (last - first) * step // (count - 1) for step in range(count)]


def timeline_of(points: Sequence[Point], *, exact: bool) -> Timeline | None:
    """Return the timeline of a journal from some of its events, in order; between two, a constant rate is assumed."""
    if len(points) < 2:
        return None
    times = [point.time_ms for point in points]  # a clock may have been set back
    from_ms, to_ms = min(times), max(times)
    width_ms = (to_ms - from_ms) / BARS
    if width_ms <= 0:
        return None
    counts = [0.0] * BARS

    def bar_of(time_ms: float) -> int:
        return max(0, min(BARS - 1, int((time_ms - from_ms) / width_ms)))

    counts[bar_of(times[0])] = 1.0
    for one, two in pairwise(points):
        events, start_ms, end_ms = two.number - one.number, one.time_ms, two.time_ms
        if exact or end_ms <= start_ms or bar_of(start_ms) == bar_of(end_ms):
            counts[bar_of(end_ms)] += events
            continue
        for bar in range(bar_of(start_ms), bar_of(end_ms) + 1):
            left_ms, right_ms = from_ms + bar * width_ms, from_ms + (bar + 1) * width_ms
            covered_ms = min(right_ms, end_ms) - max(left_ms, start_ms)
            counts[bar] += events * max(0.0, covered_ms) / (end_ms - start_ms)
    most = max(counts)
    bars = [
        Bar(from_ms=int(from_ms + n * width_ms), events=count, share=count / most) for n, count in enumerate(counts)
    ]
    return Timeline(from_ms=from_ms, to_ms=to_ms, bars=bars, exact=exact)
