"""Flushing a region's entries to files, exactly once: stage → commit in a manifest → publish → mark deleted.

The manifest decides. What is staged but not committed is no part of it and is staged anew; what is committed is
published and marked by whoever comes next. The region is opened with `writable=False`: its owner writes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tidebook.core.errors import NotFound
from tidebook.wal.meta import RegionMeta
from tidebook.wal.region import Region


class Life(NamedTuple):
    """A table between its creation and its drop: the same id made again is another one."""

    table: int
    life: int


class Range(msgspec.Struct, frozen=True):
    """Entries of one table: numbers `first` to `last`, both included."""

    table: int
    life: int
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1


class Sink(Protocol):
    """Where the entries go. Every step may be repeated after a crash."""

    async def committed(self) -> Mapping[Life, int]:
        """The last number of each table that the manifest holds; published too when this returns."""
        ...

    async def stage(self, region: Region, ranges: Sequence[Range]) -> Sequence[str]:
        """Write the entries where no reader looks yet; the names of the files."""
        ...

    async def commit(self, ranges: Sequence[Range], files: Sequence[str]) -> None:
        """Make the ranges count, all at once. Raises Conflict where another flush was quicker."""
        ...


class Flushed(msgspec.Struct, frozen=True):
    """What a flush did."""

    region: int
    ranges: tuple[Range, ...]

    @property
    def entries(self) -> int:
        return sum(each.count for each in self.ranges)


def plan_flush(meta: RegionMeta, committed: Mapping[Life, int], *, entries_max: int | None = None) -> list[Range]:
    """The entries that are in the region and not in the manifest, at most about `entries_max` of each table."""
    ranges = []
    for table, held in sorted(meta.tables.items()):
        first = max(held.mapping.start, committed.get(Life(table, held.life), 0) + 1)
        last = held.next_seq_num - 1
        if entries_max is not None:
            last = min(last, first + entries_max - 1)
        if first <= last:
            ranges.append(Range(table, held.life, first, last))
    return ranges


def plan_marks(meta: RegionMeta, committed: Mapping[Life, int]) -> list[tuple[Life, int]]:
    """The marks that the manifest allows and the region does not have yet: table, its life, and sequence number."""
    return [
        (Life(table, held.life), last + 1)
        for table, held in sorted(meta.tables.items())
        if (last := committed.get(Life(table, held.life), 0)) >= max(1, held.latest_marked_deleted)
    ]


async def flush_region(region: Region, sink: Sink, *, entries_max: int | None = None) -> Flushed:
    """Move what a region holds into the sink, then mark it deleted. A crash anywhere loses and doubles nothing."""
    await region.refresh()
    committed = await sink.committed()
    await _mark(region, committed)
    ranges = plan_flush(region.meta, committed, entries_max=entries_max)
    if ranges:
        files = await sink.stage(region, ranges)
        await sink.commit(ranges, files)
        await _mark(region, await sink.committed())
    return Flushed(region.id, tuple(ranges))


async def _mark(region: Region, committed: Mapping[Life, int]) -> None:
    for (table, life), seq in plan_marks(region.meta, committed):
        try:
            await region.mark_deleted(table, seq, life=life)
        except NotFound:
            pass  # dropped meanwhile: nothing is left to mark
