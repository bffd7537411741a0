"""Which record holds which sequence number: kept by batch, seen as a mapping of every number."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Self

from tidebook.core.errors import Corrupt


class SeqOffsets(Mapping[int, int]):
    """Sequence number → offset of its record, at 16 bytes a batch however many numbers the batch holds.

    The arrays only grow at their end; what removes from the front makes new ones. So `frozen` costs nothing, and a
    reader keeps what it began with.

    >>> held = SeqOffsets(2)
    >>> held.append(2, offset=16); held.append(1, offset=31)
    >>> dict(held)
    {2: 16, 3: 16, 4: 31}
    """

    __slots__ = ("_batches", "_firsts", "_offsets", "_stop")

    def __init__(self, start: int = 1) -> None:
        self._firsts = array("q")
        self._offsets = array("q")
        self._batches = 0
        self._stop = start

    @property
    def start(self) -> int:
        """The first number that is mapped; `stop` where none is."""
        return self._firsts[0] if self._batches else self._stop

    @property
    def stop(self) -> int:
        """The number after the last."""
        return self._stop

    @property
    def first_offset(self) -> int | None:
        """The oldest record that is still needed."""
        return self._offsets[0] if self._batches else None

    @property
    def last_offset(self) -> int | None:
        """The youngest record that is mapped."""
        return self._offsets[self._batches - 1] if self._batches else None

    def append(self, count: int, *, offset: int) -> None:
        """Map the next `count` numbers to one record."""
        if not self._batches or self._offsets[-1] != offset:
            self._firsts.append(self._stop)
            self._offsets.append(offset)
            self._batches += 1
        self._stop += count

    def remove_below(self, seq: int) -> None:
        """Forget the numbers below `seq`."""
        if seq <= self.start:
            return
        if seq >= self._stop:
            kept = self._batches
        else:
            kept = self._index(seq)
        self._firsts, self._offsets = self._firsts[kept : self._batches], self._offsets[kept : self._batches]
        self._batches = len(self._firsts)
        if self._batches and self._firsts[0] < seq:
            self._firsts[0] = seq

    def frozen(self) -> SeqOffsets:
        """The mapping as it is now, whatever comes."""
        copy = SeqOffsets.__new__(SeqOffsets)
        copy._firsts, copy._offsets, copy._batches, copy._stop = self._firsts, self._offsets, self._batches, self._stop
        return copy

    def within(self, *, seqs: range | None = None, offsets: range | None = None) -> SeqOffsets:
        """The part of it whose numbers and whose offsets lie in these ranges."""
        first, stop = 0, self._batches
        if offsets is not None:
            first = bisect_left(self._offsets, offsets.start, 0, stop)
            stop = bisect_left(self._offsets, offsets.stop, 0, stop)
        part = SeqOffsets(self._firsts[stop] if stop < self._batches else self._stop)
        part._firsts, part._offsets = self._firsts[first:stop], self._offsets[first:stop]
        part._batches = len(part._firsts)
        if seqs is not None:
            part.remove_below(min(seqs.start, part._stop))
            part._remove_from(max(seqs.stop, part.start))
        return part

    def _remove_from(self, seq: int) -> None:
        if seq < self._stop:
            kept = bisect_left(self._firsts, seq, 0, self._batches)
            self._firsts, self._offsets = self._firsts[:kept], self._offsets[:kept]
            self._batches, self._stop = kept, seq

    def batches(self, start: int = 0) -> Iterator[tuple[int, int, int]]:
        """(first, stop, offset) of each batch that holds a number at or after `start`."""
        firsts, offsets = self._firsts, self._offsets
        begin = self._index(start) if self._batches and start > firsts[0] else 0
        for index in range(begin, self._batches):
            first = firsts[index]
            stop = firsts[index + 1] if index + 1 < self._batches else self._stop
            if start < stop:
                yield max(first, start), stop, offsets[index]

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
        return self._offsets[self._index(seq)]

    def __len__(self) -> int:
        return self._stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self._stop))

    def __repr__(self) -> str:
        return f"SeqOffsets({self.start}..{self._stop - 1} in {self._batches} batches)"

    def _index(self, seq: int) -> int:
        return bisect_right(self._firsts, seq, 0, self._batches) - 1

    def packed(self) -> tuple[bytes, bytes]:
        """Firsts and offsets as a snapshot keeps them: 8 bytes each, little-endian."""
        return _bytes(self._firsts[: self._batches]), _bytes(self._offsets[: self._batches])

    @classmethod
    def unpacked(cls, firsts: bytes, offsets: bytes, stop: int) -> Self:
        """Undo `packed`. Raises Corrupt where the two contradict each other."""
        if len(firsts) != len(offsets) or len(firsts) % 8:
            raise Corrupt("a table's mapping has other offsets than sequence numbers")
        mapping = cls(stop)
        mapping._firsts, mapping._offsets = _array(firsts), _array(offsets)
        mapping._batches = len(mapping._firsts)
        if mapping._batches and mapping._firsts[-1] >= stop:
            raise Corrupt("a table's mapping reaches past its next sequence number")
        return mapping


def _bytes(values: array[int]) -> bytes:
    if sys.byteorder != "little":
        values.byteswap()
    return values.tobytes()


def _array(data: bytes) -> array[int]:
    values = array("q", data)
    if sys.byteorder != "little":
        values.byteswap()
    return values
