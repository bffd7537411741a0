"""How many bytes lie behind an offset, told from a bounded number of samples."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final

import msgspec

SAMPLES_MAX: Final = 128
_STEP_BYTES_LEAST: Final = 1024


class MeterState(msgspec.Struct, frozen=True, array_like=True):
    """A meter as snapshots carry it."""

    total_bytes: int
    step_bytes: int
    offsets: tuple[int, ...]
    totals: tuple[int, ...]


class Meter:
    """The bytes written so far, sampled at offsets; past the bound every second sample goes and the step doubles."""

    __slots__ = ("_offsets", "_step_bytes", "_totals", "total_bytes")

    def __init__(self, state: MeterState | None = None) -> None:
        state = state or MeterState(0, _STEP_BYTES_LEAST, (), ())
        self.total_bytes = state.total_bytes
        self._step_bytes = state.step_bytes
        self._offsets = array("q", state.offsets)
        self._totals = array("q", state.totals)

    def add(self, offset: int, size_bytes: int) -> None:
        """Count the record at `offset`."""
        if not self._totals or self.total_bytes - self._totals[-1] >= self._step_bytes:
            self._offsets.append(offset)
            self._totals.append(self.total_bytes)
            if len(self._offsets) > SAMPLES_MAX:
                self._offsets, self._totals = self._offsets[::2], self._totals[::2]
                self._step_bytes *= 2
        self.total_bytes += size_bytes

    def bytes_from(self, offset: int) -> int:
        """The bytes of the records at or after `offset`: never too few, too many by less than two steps."""
        if not self._offsets:
            return 0
        index = max(0, bisect_right(self._offsets, offset) - 1)
        return self.total_bytes - self._totals[index]

    def remove_below(self, offset: int) -> None:
        """Forget the samples that nobody below `offset` will ask for."""
        index = bisect_right(self._offsets, offset) - 1
        if index > 0:
            self._offsets, self._totals = self._offsets[index:], self._totals[index:]

    @property
    def state(self) -> MeterState:
        return MeterState(self.total_bytes, self._step_bytes, tuple(self._offsets), tuple(self._totals))

    def copy(self) -> Meter:
        return Meter(self.state)
