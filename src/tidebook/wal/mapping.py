"""Map the sequence numbers of a table to log offsets, in 8 or 16 bytes per batch of entries."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import lt
from typing import Final

import msgspec

from tidebook.core.bounds import PositiveCounter
from tidebook.core.errors import Corrupt
from tidebook.wal.record import array_from_bytes, array_to_bytes

#: Sequence numbers and offsets take 4 bytes each, until one of them needs 8.
_NARROW: Final = "I"
_WIDE: Final = "q"
_NARROW_MAX: Final = 2**32 - 1


class PackedMapping(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The serialized form of `SeqOffsets`, for snapshots and Spark tasks: 4 or 8 bytes per number, little-endian."""

    stop: PositiveCounter
    wide: bool
    firsts: bytes
    offsets: bytes


class SeqOffsets(Mapping[int, int]):
    """A mapping from sequence number to the offset of its record. A batch of any size takes 8 or 16 bytes.

    Arrays are only appended to; removing from the front creates new ones. Therefore `frozen` copies nothing, and a
    reader keeps the state that it started with.

    >>> mapping = SeqOffsets(2)
    >>> mapping.append(2, offset=16); mapping.append(1, offset=31)
    >>> dict(mapping)
    {2: 16, 3: 16, 4: 31}
    """

    __slots__ = ("_batches", "_firsts", "_offsets", "_stop")

    def __init__(self, start: int = 1) -> None:
        self._firsts = array(_NARROW)
        self._offsets = array(_NARROW)
        self._batches = 0
        self._stop = start

    @property
    def start(self) -> int:
        """The first mapped sequence number; equal to `stop` if the mapping is empty."""
        return self._firsts[0] if self._batches else self._stop

    @property
    def stop(self) -> int:
        """The sequence number after the last mapped one."""
        return self._stop

    @property
    def first_offset(self) -> int | None:
        """The offset of the oldest mapped record; None if the mapping is empty."""
        return self._offsets[0] if self._batches else None

    @property
    def last_offset(self) -> int | None:
        """The offset of the newest mapped record; None if the mapping is empty."""
        return self._offsets[self._batches - 1] if self._batches else None

    def append(self, count: int, *, offset: int) -> None:
        """Map the next `count` sequence numbers to the record at `offset`."""
        if not self._batches or self._offsets[-1] != offset:
            self._widen_for(max(self._stop, offset))
            self._firsts.append(self._stop)
            self._offsets.append(offset)
            self._batches += 1
        self._stop += count

    def _widen_for(self, number: int) -> None:
        if number > _NARROW_MAX and self._firsts.typecode == _NARROW:
            self._firsts, self._offsets = array(_WIDE, self._firsts), array(_WIDE, self._offsets)

    def remove_below(self, seq: int) -> None:
        """Remove the sequence numbers below `seq`."""
        if seq <= self.start:
            return
        first = self._batches if seq >= self._stop else self._index(seq)
        self._firsts, self._offsets = self._firsts[first : self._batches], self._offsets[first : self._batches]
        self._batches = len(self._firsts)
        if self._batches and seq > self._firsts[0]:
            self._widen_for(seq)
            self._firsts[0] = seq

    def frozen(self) -> SeqOffsets:
        """Return a view of the current state that later changes do not affect; the arrays are shared."""
        return _mapping(self._firsts, self._offsets, self._batches, self._stop)

    def within(self, *, seqs: range | None = None, offsets: range | None = None) -> SeqOffsets:
        """Return a copy restricted to these ranges of sequence numbers and of offsets."""
        first, stop = 0, self._batches
        if offsets is not None:
            first = bisect_left(self._offsets, offsets.start, 0, stop)
            stop = bisect_left(self._offsets, offsets.stop, 0, stop)
        end = self._firsts[stop] if stop < self._batches else self._stop
        part = _mapping(self._firsts[first:stop], self._offsets[first:stop], max(0, stop - first), end)
        if seqs is not None:
            part.remove_below(min(seqs.start, part._stop))
            part._remove_from(max(seqs.stop, part.start))
        return part

    def _remove_from(self, seq: int) -> None:
        if seq < self._stop:
            count = bisect_left(self._firsts, seq, 0, self._batches)
            self._firsts, self._offsets = self._firsts[:count], self._offsets[:count]
            self._batches, self._stop = count, seq

    def batches(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first, stop, offset) of each batch, in order."""
        for index in range(self._batches):
            stop = self._firsts[index + 1] if index + 1 < self._batches else self._stop
            yield self._firsts[index], stop, self._offsets[index]

    @property
    def batch_count(self) -> int:
        """The number of batches."""
        return self._batches

    @property
    def size_bytes(self) -> int:
        """The memory that the mapping uses."""
        return sys.getsizeof(self) + sys.getsizeof(self._firsts) + sys.getsizeof(self._offsets)

    def __getitem__(self, seq: int) -> int:
        if type(seq) is not int or not self.start <= seq < self._stop:
            raise KeyError(seq)
        return self._offsets[self._index(seq)]

    def __len__(self) -> int:
        return self._stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self._stop))

    def __repr__(self) -> str:
        return f"SeqOffsets({self.start}..{self._stop - 1} in {self._batches} batches)"

    def _index(self, seq: int) -> int:
        return bisect_right(self._firsts, seq, 0, self._batches) - 1

    def packed(self) -> PackedMapping:
        """Return the mapping in serializable form."""
        firsts, offsets = self._firsts[: self._batches], self._offsets[: self._batches]
        is_wide = firsts.typecode == _WIDE
        return PackedMapping(self._stop, is_wide, array_to_bytes(firsts), array_to_bytes(offsets))

    @classmethod
    def unpacked(cls, packed: PackedMapping) -> SeqOffsets:
        """Return the mapping that `packed` serialized; raise `Corrupt` if it is inconsistent."""
        code = _WIDE if packed.wide else _NARROW
        if len(packed.firsts) != len(packed.offsets) or len(packed.firsts) % array(code).itemsize:
            raise Corrupt("a table's mapping has a different number of offsets and sequence numbers")
        firsts, offsets = array_from_bytes(code, packed.firsts), array_from_bytes(code, packed.offsets)
        if firsts and firsts[-1] >= packed.stop:
            raise Corrupt("a table's mapping reaches past its next sequence number")
        if not _is_ascending(firsts, 1) or not _is_ascending(offsets, 0):
            raise Corrupt("a table's mapping is out of order")
        return _mapping(firsts, offsets, len(firsts), packed.stop)


def _mapping(firsts: array[int], offsets: array[int], batches: int, stop: int) -> SeqOffsets:
    mapping = SeqOffsets(stop)
    mapping._firsts, mapping._offsets, mapping._batches = firsts, offsets, batches
    return mapping


def _is_ascending(values: array[int], least: int) -> bool:
    """Return whether the values are strictly ascending and all at least `least`."""
    return not values or (values[0] >= least and all(map(lt, values, islice(values, 1, None))))
