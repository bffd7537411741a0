"""How many bytes lie behind an offset, told from a bounded number of samples."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import msgspec

SAMPLES_MAX: Final = 256
_STEP_BYTES_LEAST: Final = 1024


class Meter(msgspec.Struct, array_like=True):
    """The bytes written so far, sampled at offsets; past the bound every second sample goes and the step doubles."""

    total_bytes: int = 0
    step_bytes: int = _STEP_BYTES_LEAST
    offsets: list[int] = []
    totals: list[int] = []

    def add(self, offset: int, size_bytes: int) -> None:
        """Count the record at `offset`."""
        if not self.totals or self.total_bytes - self.totals[-1] >= self.step_bytes:
            self.offsets.append(offset)
            self.totals.append(self.total_bytes)
            if len(self.offsets) > SAMPLES_MAX:
                self.offsets, self.totals = self.offsets[::2], self.totals[::2]
                self.step_bytes *= 2
        self.total_bytes += size_bytes

    def bytes_from(self, offset: int) -> int:
        """The bytes of the records at or after `offset`: never too few, too many by less than two steps."""
        if not self.offsets:
            return 0
        index = max(0, bisect_right(self.offsets, offset) - 1)
        return self.total_bytes - self.totals[index]

    def remove_below(self, offset: int) -> None:
        """Forget the samples that nobody below `offset` will ask for."""
        index = bisect_right(self.offsets, offset) - 1
        if index > 0:
            self.offsets, self.totals = self.offsets[index:], self.totals[index:]

    def copy(self) -> Meter:
        return Meter(self.total_bytes, self.step_bytes, list(self.offsets), list(self.totals))
