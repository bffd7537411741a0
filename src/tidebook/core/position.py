"""The position of a record in the log, and the write timestamps that are derived from it.

An offset alone does not identify a record, because a topic that is created again starts at offset 0. The epoch
distinguishes the incarnations of a topic, so the positions of a journal are ordered by (epoch, offset).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NewType

import msgspec

from tidebook.core.bounds import EPOCH_BITS, EPOCH_MAX, OFFSET_BITS, OFFSET_MAX

Partition = NewType("Partition", int)
Offset = NewType("Offset", int)
Epoch = NewType("Epoch", int)

FIRST_EPOCH = Epoch(1)


class Position(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """The position of a record within its partition, across all incarnations of the topic."""

    epoch: Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]
    #: -1 is the position before the first record.
    offset: Annotated[int, msgspec.Meta(ge=-1, le=OFFSET_MAX)]

    def __iter__(self) -> Iterator[int]:
        yield self.epoch
        yield self.offset

    @property
    def next(self) -> Position:
        """The position after this one in the same epoch."""
        return Position(self.epoch, self.offset + 1)


#: The position before every record of the first epoch.
START = Position(FIRST_EPOCH, -1)

_REV_BITS = 3
_EPOCH_SHIFT = OFFSET_BITS + _REV_BITS + 1


def write_stamp(position: Position, *, rev: int = 0) -> int:
    """Return the write timestamp of the rows and heads that the record at `position` produces.

    It is derived from the log and not from a clock, so a late write of a zombie never overwrites a newer one. A repair
    raises `rev`, in order to overwrite what it repairs.
    """
    if not 0 <= position.offset < 1 << OFFSET_BITS or not 0 < position.epoch < 1 << EPOCH_BITS or not 0 <= rev < 1 << 3:
        raise OverflowError(f"no timestamp can be derived from {position} with revision {rev}")
    return position.epoch << _EPOCH_SHIFT | position.offset << (_REV_BITS + 1) | rev << 1 | 1


def tombstone_stamp(position: Position, *, rev: int = 0) -> int:
    """Return the timestamp of the deletes that the record at `position` makes.

    It is one below the timestamp of the record's writes, which therefore survive the deletes.
    """
    return write_stamp(position, rev=rev) - 1
