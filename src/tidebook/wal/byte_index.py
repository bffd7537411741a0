"""Estimate how many bytes of a log follow an offset, from a bounded number of samples."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final

import msgspec

from tidebook.core.bounds import Counter, PositiveCounter

SAMPLES_MAX: Final = 128
_STEP_BYTES_MIN: Final = 1024


class ByteIndexState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A byte index as stored in snapshots."""

    total_bytes: Counter
    step_bytes: PositiveCounter
    offsets: tuple[Counter, ...]
    totals: tuple[Counter, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.totals):
            raise ValueError("a byte index has a different number of offsets and totals")


class ByteIndex:
    """Samples of the total bytes at offsets; at `SAMPLES_MAX` every second sample is dropped and the step doubles."""

    __slots__ = ("_offsets", "_step_bytes", "_totals", "total_bytes")

    def __init__(self, state: ByteIndexState | None = None) -> None:
        state = state or ByteIndexState(0, _STEP_BYTES_MIN, (), ())
        self.total_bytes = state.total_bytes
        self._step_bytes = state.step_bytes
        self._offsets = array("q", state.offsets)
        self._totals = array("q", state.totals)

    def add(self, offset: int, size_bytes: int) -> None:
        """Add the size of the record at `offset`."""
        if not self._totals or self.total_bytes - self._totals[-1] >= self._step_bytes:
            self._offsets.append(offset)
            self._totals.append(self.total_bytes)
            if len(self._offsets) > SAMPLES_MAX:
                self._offsets, self._totals = self._offsets[::2], self._totals[::2]
                self._step_bytes *= 2
        self.total_bytes += size_bytes

    def bytes_from(self, offset: int) -> int:
        """Return the bytes of the records from `offset` on: an upper bound, too high by less than two steps."""
        if not self._offsets:
            return 0
        index = max(0, bisect_right(self._offsets, offset) - 1)
        return self.total_bytes - self._totals[index]

    def remove_below(self, offset: int) -> None:
        """Drop the samples that no query from `offset` on needs."""
        index = bisect_right(self._offsets, offset) - 1
        if index > 0:
            self._offsets, self._totals = self._offsets[index:], self._totals[index:]

    @property
    def state(self) -> ByteIndexState:
        """The index as stored in snapshots."""
        return ByteIndexState(self.total_bytes, self._step_bytes, tuple(self._offsets), tuple(self._totals))

    def copy(self) -> ByteIndex:
        """Return an independent copy."""
        return ByteIndex(self.state)
