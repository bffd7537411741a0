"""Time buckets: how a tag's stream is cut into partitions of the store, and how that cut may change."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput

#: Which setting of a store holds the history.
BUCKETS_SETTING: Final = "tags/buckets"
SIZES_MS: Final = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000}
#: A change takes effect at least this far ahead of all that was written.
LEAD_MS: Final = 60_000
#: So far ahead of what is written the history is fixed at once: one compare-and-set in so much of the log's time.
FIXED_AHEAD_MS: Final = 300_000


class Change(msgspec.Struct, frozen=True, array_like=True):
    """From this time of the log on, buckets have this size."""

    from_ms: int
    size: str
    #: Before this time no other change takes effect: rows are written below it. An older Tidebook ignores it.
    fixed_ms: int = 0


class Buckets(msgspec.Struct, frozen=True):
    """The history of bucket sizes; the first one holds from the beginning of time."""

    changes: tuple[Change, ...] = (Change(0, "hour"),)

    @property
    def fixed_ms(self) -> int:
        """Below this time the history stays as it is, whoever changes it."""
        last = self.changes[-1]
        return max(last.from_ms, last.fixed_ms)

    def fixed(self, time_ms: int) -> Buckets:
        """The same, fixed beyond a time at which rows are about to be written."""
        *before, last = self.changes
        fixed_ms = max(self.fixed_ms, time_ms + FIXED_AHEAD_MS)
        return Buckets((*before, Change(last.from_ms, last.size, fixed_ms)))

    def start(self, time_ms: int) -> int:
        """The bucket of a time, named by when it begins. Buckets of growing times never go back."""
        return self.span(time_ms)[0]

    def span(self, time_ms: int) -> tuple[int, int]:
        """The bucket of a time: when it begins, and the first time behind it."""
        found = bisect_right(self.changes, time_ms, key=lambda each: each.from_ms)
        change = self.changes[max(0, found - 1)]
        size_ms = SIZES_MS[change.size]
        begin_ms = time_ms // size_ms * size_ms
        end_ms = begin_ms + size_ms
        if found < len(self.changes):
            end_ms = min(end_ms, self.changes[found].from_ms)
        return max(begin_ms, change.from_ms), end_ms

    def before(self, time_ms: int) -> int:
        """The bucket before the one of a time."""
        return self.start(max(0, self.start(time_ms) - 1))

    def changed(self, size: str, *, from_ms: int) -> Buckets:
        """The same with another size from a time on, behind all changes so far and not within what is fixed."""
        if size not in SIZES_MS:
            raise InvalidInput(f"a bucket is one {', one '.join(SIZES_MS)}, not {size!r}")
        if from_ms <= self.changes[-1].from_ms:
            raise InvalidInput(f"a change at {from_ms} must come after the last one, at {self.changes[-1].from_ms}")
        if from_ms < self.fixed_ms:
            raise InvalidInput(f"a change at {from_ms} must not come before {self.fixed_ms}: rows may be there already")
        return Buckets((*self.changes, Change(from_ms, size)))


def encode_buckets(buckets: Buckets) -> str:
    """The history as the setting has it."""
    return msgspec.json.encode(buckets.changes).decode()


def decode_buckets(text: str) -> Buckets:
    """Undo `encode_buckets`."""
    try:
        changes = msgspec.json.decode(text, type=tuple[Change, ...])
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the history of bucket sizes is damaged: {error}") from error
    if not changes or any(each.size not in SIZES_MS for each in changes):
        raise Corrupt(f"the history of bucket sizes is damaged: {text[:200]}")
    return Buckets(changes)
