"""Which record holds which sequence number: kept by batch, seen as a mapping of every number."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from tidebook.core.errors import Corrupt

#: Numbers and offsets are kept as distances from a base, in 4 bytes each until one does not fit.
_NARROW: Final = "I"
_WIDE: Final = "q"
_NARROW_MAX: Final = 2**32 - 1


class PackedMapping(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A mapping as snapshots and Spark tasks carry it: distances of 4 or 8 bytes each, little-endian."""

    stop: int
    first_base: int
    offset_base: int
    wide: bool
    firsts: bytes
    offsets: bytes


class SeqOffsets(Mapping[int, int]):
    """Sequence number → offset of its record, at 8 bytes a batch however many numbers the batch holds.

    The arrays only grow at their end; what removes from the front makes new ones. So `frozen` costs nothing, and a
    reader keeps what it began with.

    >>> held = SeqOffsets(2)
    >>> held.append(2, offset=16); held.append(1, offset=31)
    >>> dict(held)
    {2: 16, 3: 16, 4: 31}
    """

    __slots__ = ("_batches", "_first_base", "_firsts", "_offset_base", "_offsets", "_stop")

    def __init__(self, start: int = 1) -> None:
        self._firsts = array(_NARROW)
        self._offsets = array(_NARROW)
        self._first_base = start
        self._offset_base = 0
        self._batches = 0
        self._stop = start

    @property
    def start(self) -> int:
        """The first number that is mapped; `stop` where none is."""
        return self._firsts[0] + self._first_base if self._batches else self._stop

    @property
    def stop(self) -> int:
        """The number after the last."""
        return self._stop

    @property
    def first_offset(self) -> int | None:
        """The oldest record that is still needed."""
        return self._offsets[0] + self._offset_base if self._batches else None

    @property
    def last_offset(self) -> int | None:
        """The youngest record that is mapped."""
        return self._offsets[self._batches - 1] + self._offset_base if self._batches else None

    def append(self, count: int, *, offset: int) -> None:
        """Map the next `count` numbers to one record."""
        if not self._batches:
            self._first_base, self._offset_base = self._stop, offset
            self._firsts, self._offsets = array(_NARROW, (0,)), array(_NARROW, (0,))
            self._batches = 1
        elif self._offsets[-1] != (at := offset - self._offset_base):
            first = self._stop - self._first_base
            if (first > _NARROW_MAX or at > _NARROW_MAX) and self._firsts.typecode == _NARROW:
                self._firsts, self._offsets = array(_WIDE, self._firsts), array(_WIDE, self._offsets)
            self._firsts.append(first)
            self._offsets.append(at)
            self._batches += 1
        self._stop += count

    def remove_below(self, seq: int) -> None:
        """Forget the numbers below `seq`."""
        if seq <= self.start:
            return
        kept = self._batches if seq >= self._stop else self._index(seq)
        self._firsts, self._offsets = self._firsts[kept : self._batches], self._offsets[kept : self._batches]
        self._batches = len(self._firsts)
        if self._batches:
            self._firsts[0] = max(self._firsts[0], seq - self._first_base)

    def frozen(self) -> SeqOffsets:
        """The mapping as it is now, whatever comes."""
        return self._copy(self._firsts, self._offsets, self._batches, self._stop)

    def within(self, *, seqs: range | None = None, offsets: range | None = None) -> SeqOffsets:
        """The part of it whose numbers and whose offsets lie in these ranges."""
        first, stop = 0, self._batches
        if offsets is not None:
            first = bisect_left(self._offsets, offsets.start - self._offset_base, 0, stop)
            stop = bisect_left(self._offsets, offsets.stop - self._offset_base, 0, stop)
        end = self._firsts[stop] + self._first_base if stop < self._batches else self._stop
        part = self._copy(self._firsts[first:stop], self._offsets[first:stop], max(0, stop - first), end)
        if seqs is not None:
            part.remove_below(min(seqs.start, part._stop))
            part._remove_from(max(seqs.stop, part.start))
        return part

    def _remove_from(self, seq: int) -> None:
        if seq < self._stop:
            kept = bisect_left(self._firsts, seq - self._first_base, 0, self._batches)
            self._firsts, self._offsets = self._firsts[:kept], self._offsets[:kept]
            self._batches, self._stop = kept, seq

    def _copy(self, firsts: array[int], offsets: array[int], batches: int, stop: int) -> SeqOffsets:
        copy = SeqOffsets.__new__(SeqOffsets)
        copy._firsts, copy._offsets, copy._batches, copy._stop = firsts, offsets, batches, stop
        copy._first_base, copy._offset_base = self._first_base, self._offset_base
        return copy

    def batches(self) -> Iterator[tuple[int, int, int]]:
        """(first, stop, offset) of each batch."""
        first_base, offset_base = self._first_base, self._offset_base
        first = self.start
        for index in range(1, self._batches):
            stop = self._firsts[index] + first_base
            yield first, stop, self._offsets[index - 1] + offset_base
            first = stop
        if self._batches:
            yield first, self._stop, self._offsets[self._batches - 1] + offset_base

    @property
    def batch_count(self) -> int:
        return self._batches

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""
        return sys.getsizeof(self) + sys.getsizeof(self._firsts) + sys.getsizeof(self._offsets)

    def __getitem__(self, seq: int) -> int:
        if type(seq) is not int or not self.start <= seq < self._stop:
            raise KeyError(seq)
        return self._offsets[self._index(seq)] + self._offset_base

    def __len__(self) -> int:
        return self._stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self._stop))

    def __repr__(self) -> str:
        return f"SeqOffsets({self.start}..{self._stop - 1} in {self._batches} batches)"

    def _index(self, seq: int) -> int:
        return bisect_right(self._firsts, seq - self._first_base, 0, self._batches) - 1

    def packed(self) -> PackedMapping:
        """The mapping as bytes."""
        return PackedMapping(
            self._stop,
            self._first_base,
            self._offset_base,
            self._firsts.typecode == _WIDE,
            _bytes(self._firsts[: self._batches]),
            _bytes(self._offsets[: self._batches]),
        )

    @classmethod
    def unpacked(cls, packed: PackedMapping) -> SeqOffsets:
        """Undo `packed`. Raises Corrupt where it contradicts itself."""
        code = _WIDE if packed.wide else _NARROW
        mapping = cls(packed.stop)
        mapping._first_base, mapping._offset_base = packed.first_base, packed.offset_base
        if len(packed.firsts) != len(packed.offsets) or len(packed.firsts) % array(code).itemsize:
            raise Corrupt("a table's mapping has other offsets than sequence numbers")
        mapping._firsts, mapping._offsets = _array(code, packed.firsts), _array(code, packed.offsets)
        mapping._batches = len(mapping._firsts)
        if mapping._batches and mapping._firsts[-1] + packed.first_base >= packed.stop:
            raise Corrupt("a table's mapping reaches past its next sequence number")
        return mapping


def _bytes(values: array[int]) -> bytes:
    if sys.byteorder != "little":
        values.byteswap()
    return values.tobytes()


def _array(code: str, data: bytes) -> array[int]:
    values = array(code, data)
    if sys.byteorder != "little":
        values.byteswap()
    return values
