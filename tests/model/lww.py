"""A last-write-wins store of cells, in which each row, each segment's tombstone and each head is applied separately.

It is a model of Cassandra, not a backend: what a replicator writes is taken apart into single writes, any of which
may be the last before a crash, or land long after its writer was given up. States are immutable and hashable.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple, assert_never

from tidebook.core.head import Head, encode_head
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    EventRow,
    ForgetSegments,
    PutEvents,
    PutHead,
    PutSegments,
    PutTags,
    Write,
    listed_between,
    segments_between,
)
from tidebook.core.segments import event_segment

#: Which segments of which incarnation are listed.
Listed = Set[tuple[Position, int]]


class RowCell(NamedTuple):
    """One event row."""

    seq_nr: int
    stamp: int
    row: int


class Tombstone(NamedTuple):
    """The numbers `first` to `last` of one segment, cleared."""

    first: int
    last: int
    stamp: int


class HeadCell(NamedTuple):
    """The head row."""

    stamp: int
    head: int


class HeadTombstone(NamedTuple):
    """A deleted head row; only broken rules write it."""

    stamp: int


class SegmentCell(NamedTuple):
    """A segment in the list of one incarnation."""

    incarnation: Position
    segment: int
    stamp: int


class ListTombstone(NamedTuple):
    """The segments before `below` of one incarnation's list, cleared."""

    incarnation: Position
    below: int
    stamp: int


Single = RowCell | Tombstone | HeadCell | HeadTombstone | SegmentCell | ListTombstone


class KeyCells(NamedTuple):
    """All that the store holds for one journal."""

    rows: tuple[RowCell, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    head: HeadCell | None = None
    head_tombstone: int = -1
    segments: tuple[SegmentCell, ...] = ()
    list_tombstones: tuple[ListTombstone, ...] = ()

    @property
    def listed(self) -> Listed:
        return frozenset((cell.incarnation, cell.segment) for cell in self.segments)


EMPTY = KeyCells()


def land(cells: KeyCells, single: Single) -> KeyCells:
    """Return the cells after one write has been applied; the same object if it was too late to have an effect."""
    match single:
        case RowCell():
            return _land_row(cells, single)
        case Tombstone():
            return _land_tombstone(cells, single)
        case HeadCell():
            if single.stamp <= cells.head_tombstone or (cells.head is not None and cells.head >= single):
                return cells
            return cells._replace(head=single)
        case HeadTombstone():
            if single.stamp <= cells.head_tombstone:
                return cells
            head = None if cells.head is not None and cells.head.stamp <= single.stamp else cells.head
            return cells._replace(head=head, head_tombstone=single.stamp)
        case SegmentCell():
            return _land_segment(cells, single)
        case ListTombstone():
            return _land_list_tombstone(cells, single)
        case _:
            assert_never(single)


def _land_row(cells: KeyCells, cell: RowCell) -> KeyCells:
    for dead in cells.tombstones:
        if dead.first <= cell.seq_nr <= dead.last and dead.stamp >= cell.stamp:
            return cells
    kept = []
    for row in cells.rows:
        if row.seq_nr != cell.seq_nr:
            kept.append(row)
        elif row >= cell:
            return cells
    return cells._replace(rows=tuple(sorted([*kept, cell])))


def _land_tombstone(cells: KeyCells, dead: Tombstone) -> KeyCells:
    for old in cells.tombstones:
        if old.first <= dead.first and dead.last <= old.last and old.stamp >= dead.stamp:
            return cells
    others = [
        old
        for old in cells.tombstones
        if not (dead.first <= old.first and old.last <= dead.last and old.stamp <= dead.stamp)
    ]
    rows = tuple(row for row in cells.rows if not (dead.first <= row.seq_nr <= dead.last and row.stamp <= dead.stamp))
    return cells._replace(rows=rows, tombstones=tuple(sorted([*others, dead])))


def _land_segment(cells: KeyCells, cell: SegmentCell) -> KeyCells:
    if any(_unlists(dead, cell) for dead in cells.list_tombstones):
        return cells
    kept = []
    for old in cells.segments:
        if old[:2] != cell[:2]:
            kept.append(old)
        elif old.stamp >= cell.stamp:
            return cells
    return cells._replace(segments=tuple(sorted([*kept, cell])))


def _land_list_tombstone(cells: KeyCells, dead: ListTombstone) -> KeyCells:
    for old in cells.list_tombstones:
        if old.incarnation == dead.incarnation and old.below >= dead.below and old.stamp >= dead.stamp:
            return cells
    others = [
        old
        for old in cells.list_tombstones
        if not (old.incarnation == dead.incarnation and old.below <= dead.below and old.stamp <= dead.stamp)
    ]
    segments = tuple(cell for cell in cells.segments if not _unlists(dead, cell))
    return cells._replace(segments=segments, list_tombstones=tuple(sorted([*others, dead])))


def _unlists(dead: ListTombstone, cell: SegmentCell) -> bool:
    return dead.incarnation == cell.incarnation and cell.segment < dead.below and dead.stamp >= cell.stamp


def is_found(head: Head, seq_nr: int, listed: Listed) -> bool:
    """Return whether a store reads the segment of a number: it is in the head's last run, or listed."""
    segment = event_segment(seq_nr, head.segment_size)
    return segment >= head.run_start or (head.incarnation, segment) in listed


def land_by_arrival(cells: KeyCells, single: Single) -> KeyCells:
    """Apply a write as if stamps came from a clock: the last write to arrive wins."""
    match single:
        case RowCell():
            kept = [row for row in cells.rows if row.seq_nr != single.seq_nr]
            return cells._replace(rows=tuple(sorted([*kept, single])))
        case Tombstone():
            return cells._replace(
                rows=tuple(row for row in cells.rows if not single.first <= row.seq_nr <= single.last)
            )
        case HeadCell():
            return cells._replace(head=single)
        case HeadTombstone():
            return cells._replace(head=None)
        case SegmentCell() | ListTombstone():
            return land(cells, single)
        case _:
            assert_never(single)


class Interned:
    """Heads and rows by number, so that states are small and quick to compare."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.rows: list[EventRow] = []
        self._heads: dict[bytes, int] = {}
        self._rows: dict[EventRow, int] = {}

    def head(self, head: Head) -> int:
        name = encode_head(head)
        found = self._heads.get(name)
        if found is None:
            found = self._heads[name] = len(self.heads)
            self.heads.append(head)
        return found

    def known_row(self, row: EventRow) -> int | None:
        return self._rows.get(row)

    def row(self, row: EventRow) -> int:
        found = self._rows.get(row)
        if found is None:
            found = self._rows[row] = len(self.rows)
            self.rows.append(row)
        return found


def singles_of(write: Write, interned: Interned, listed: Listed) -> Iterator[Single]:
    """The single writes of one write, given the listed segments; they may land in any order among themselves."""
    match write:
        case PutEvents():
            for row in write.rows:
                yield RowCell(row.seq_nr, write_stamp(row.position), interned.row(row))
        case PutHead():
            yield HeadCell(write_stamp(write.head.position), interned.head(write.head))
        case ClearEvents():
            yield from _tombstones(write.head, write.above, write.head.delete_to, listed, whole=False)
        case ClearJournal():
            yield from _tombstones(write.head, 0, write.head.seq_nr, listed, whole=True)
        case PutSegments():
            stamp = write_stamp(write.head.incarnation)
            yield from (
                SegmentCell(write.head.incarnation, segment, stamp) for each in write.segments for segment in each
            )
        case ForgetSegments():
            head = write.head
            below = head.delete_to // head.segment_size if head.live else head.run_start
            yield ListTombstone(head.incarnation, below, tombstone_stamp(head.position))
        case PutTags():
            pass  # tag rows have a separate model
        case _:
            assert_never(write)


def _tombstones(head: Head, above: int, to: int, listed: Listed, *, whole: bool) -> Iterator[Tombstone]:
    size, stamp = head.segment_size, tombstone_stamp(head.position)
    segments = [segment for segment in listed_between(head, above, to) if (head.incarnation, segment) in listed]
    segments += [segment for each in segments_between(head, above, to) for segment in each]
    for segment in segments:
        last = (segment + 1) * size
        yield Tombstone(segment * size + 1, last if whole else min(last, to), stamp)
