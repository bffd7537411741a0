"""Time buckets: the partitions of a tag's stream in the store, and how their size may change over time."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import msgspec

from tidebook.core.bounds import DECODE_ERRORS, Counter
from tidebook.core.errors import Corrupt, InvalidInput

#: The name of the store setting that holds the history of bucket sizes.
BUCKETS_SETTING: Final = "tags/buckets"
SIZES_MS: Final = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000}
#: A change takes effect at least this long after the latest row that is already written.
LEAD_MS: Final = 60_000
#: How far beyond the written rows one compare-and-set extends the fixed part of the history, so that few are needed.
FIXED_AHEAD_MS: Final = 300_000


class BucketSizeChange(msgspec.Struct, frozen=True, array_like=True):
    """A bucket size, and the log time from which it applies."""

    from_ms: Counter
    size: str
    #: No other change takes effect before this time: rows may be written up to it. Older versions ignore it.
    fixed_ms: Counter = 0


class Buckets(msgspec.Struct, frozen=True):
    """The history of bucket sizes; the first size applies from time 0."""

    changes: tuple[BucketSizeChange, ...] = (BucketSizeChange(0, "hour"),)

    @property
    def fixed_ms(self) -> int:
        """The time before which the history can no longer change."""
        last = self.changes[-1]
        return max(last.from_ms, last.fixed_ms)

    def fixed(self, time_ms: int) -> Buckets:
        """Return the history with its fixed part extended to FIXED_AHEAD_MS after `time_ms`.

        Call this, and store the result, before rows of that time are written.
        """
        *before, last = self.changes
        fixed_ms = max(self.fixed_ms, time_ms + FIXED_AHEAD_MS)
        return Buckets((*before, BucketSizeChange(last.from_ms, last.size, fixed_ms)))

    def start(self, time_ms: int) -> int:
        """Return the start of the bucket that contains a time; it never decreases as the time increases."""
        return self.span(time_ms)[0]

    def span(self, time_ms: int) -> tuple[int, int]:
        """Return the start and the exclusive end of the bucket that contains a time."""
        next_change = bisect_right(self.changes, time_ms, key=lambda each: each.from_ms)
        change = self.changes[max(0, next_change - 1)]
        size_ms = SIZES_MS[change.size]
        begin_ms = time_ms // size_ms * size_ms
        end_ms = begin_ms + size_ms
        if next_change < len(self.changes):
            end_ms = min(end_ms, self.changes[next_change].from_ms)
        return max(begin_ms, change.from_ms), end_ms

    def before(self, time_ms: int) -> int:
        """Return the start of the bucket before the one that contains a time."""
        return self.start(max(0, self.start(time_ms) - 1))

    def changed(self, size: str, *, from_ms: int) -> Buckets:
        """Return the history with another size from a time on.

        Raise InvalidInput for an unknown size, or if the time is not after all earlier changes or is in the fixed part.
        """
        if size not in SIZES_MS:
            raise InvalidInput(f"a bucket size must be one of {', '.join(SIZES_MS)}, not {size!r}")
        if from_ms <= self.changes[-1].from_ms:
            raise InvalidInput(f"a change at {from_ms} must come after the last one, at {self.changes[-1].from_ms}")
        if from_ms < self.fixed_ms:
            raise InvalidInput(
                f"a change at {from_ms} must not come before {self.fixed_ms}, because rows may already exist"
            )
        return Buckets((*self.changes, BucketSizeChange(from_ms, size)))


def encode_buckets(buckets: Buckets) -> str:
    """Encode the history as the value of the store setting."""
    return msgspec.json.encode(buckets.changes).decode()


def decode_buckets(text: str) -> Buckets:
    """Undo `encode_buckets`; raise Corrupt for a damaged value."""
    try:
        changes = msgspec.json.decode(text, type=tuple[BucketSizeChange, ...])
    except DECODE_ERRORS as error:
        raise Corrupt(f"the history of bucket sizes is damaged: {error}") from error
    starts = [each.from_ms for each in changes]
    if not changes or any(each.size not in SIZES_MS for each in changes) or starts != sorted(set(starts)):
        raise Corrupt(f"the history of bucket sizes is damaged: {text[:200]}")
    return Buckets(changes)
