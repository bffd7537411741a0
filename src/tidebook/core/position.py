"""Where a record stands, and the write timestamp that follows from it.

Offsets alone are no identity: a topic that is made again starts over at 0. The epoch tells the lives of a
topic apart, so positions of one journal are ordered by (epoch, offset).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NewType

import msgspec

Partition = NewType("Partition", int)
Offset = NewType("Offset", int)
Epoch = NewType("Epoch", int)

FIRST_EPOCH = Epoch(1)


class Position(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """The place of a record within its partition, over all lives of the topic."""

    epoch: int
    offset: int

    def __iter__(self) -> Iterator[int]:
        yield self.epoch
        yield self.offset

    @property
    def next(self) -> Position:
        return Position(self.epoch, self.offset + 1)


#: Before every record of the first epoch.
START = Position(FIRST_EPOCH, -1)

_OFFSET_BITS = 47
_REV_BITS = 3
_EPOCH_SHIFT = _OFFSET_BITS + _REV_BITS + 1


def write_stamp(position: Position, *, rev: int = 0) -> int:
    """The timestamp under which rows and heads caused by the record at `position` are written.

    It comes from the log, never from a clock, so a late write by a zombie cannot win over a newer one.
    `rev` is raised by repairs, which must win over what they mend.
    """
    if not 0 <= position.offset < 1 << _OFFSET_BITS or not 0 < position.epoch < 1 << 12 or not 0 <= rev < 1 << 3:
        raise OverflowError(f"no timestamp can be derived from {position} with revision {rev}")
    return position.epoch << _EPOCH_SHIFT | position.offset << (_REV_BITS + 1) | rev << 1 | 1


def tombstone_stamp(position: Position, *, rev: int = 0) -> int:
    """Just below the writes of the same record: what it writes survives what it clears."""
    return write_stamp(position, rev=rev) - 1
