"""Flush a region's entries to files exactly once: stage, commit in a manifest, publish, mark deleted.

The manifest decides. Files that are staged but not committed are ignored and staged again; if a flush crashes after the
commit, the next one publishes and marks. The region is opened with `writable=False`, so its owner keeps writing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tidebook.core.errors import NotFound
from tidebook.wal.meta import RegionMeta
from tidebook.wal.region import Region


class TableIncarnation(NamedTuple):
    """A table between its creation and its drop; a table created again with the same id is another incarnation.

    `incarnation` is the offset of the record that created the table.
    """

    table: int
    incarnation: int


class Range(msgspec.Struct, frozen=True):
    """Entries of one incarnation (`life`) of a table: sequence numbers `first` to `last`, inclusive."""

    table: int
    life: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.last - self.first + 1


class Sink(Protocol):
    """The destination of a flush. Every step may be repeated after a crash."""

    async def committed(self) -> Mapping[TableIncarnation, int]:
        """Publish what is committed, and return the last committed sequence number of each table."""
        ...

    async def stage(self, region: Region, ranges: Sequence[Range]) -> Sequence[str]:
        """Write the entries to files that no reader sees yet; return the file names."""
        ...

    async def commit(self, ranges: Sequence[Range], files: Sequence[str]) -> None:
        """Commit the ranges and their files atomically; raise `Conflict` if another flush committed first."""
        ...


class Flushed(msgspec.Struct, frozen=True):
    """The result of a flush."""

    region: int
    ranges: tuple[Range, ...]

    @property
    def entries(self) -> int:
        """The number of entries flushed."""
        return sum(each.count for each in self.ranges)


def plan_flush(
    meta: RegionMeta, committed: Mapping[TableIncarnation, int], *, entries_max: int | None = None
) -> list[Range]:
    """Return the entries that the region has and the manifest does not, at most `entries_max` of each table."""
    ranges = []
    for table, table_meta in sorted(meta.tables.items()):
        first = max(table_meta.mapping.start, committed.get(TableIncarnation(table, table_meta.incarnation), 0) + 1)
        last = table_meta.next_seq_num - 1
        if entries_max is not None:
            last = min(last, first + entries_max - 1)
        if first <= last:
            ranges.append(Range(table, table_meta.incarnation, first, last))
    return ranges


def plan_marks(meta: RegionMeta, committed: Mapping[TableIncarnation, int]) -> list[tuple[TableIncarnation, int]]:
    """Return the marks that the manifest allows and the region lacks: table incarnation and sequence number."""
    return [
        (TableIncarnation(table, table_meta.incarnation), last + 1)
        for table, table_meta in sorted(meta.tables.items())
        if (last := committed.get(TableIncarnation(table, table_meta.incarnation), 0))
        >= max(1, table_meta.latest_marked_deleted)
    ]


async def flush_region(region: Region, sink: Sink, *, entries_max: int | None = None) -> Flushed:
    """Move a region's entries into the sink, then mark them deleted; a crash loses and duplicates nothing."""
    await region.refresh()
    committed = await sink.committed()
    await _mark(region, committed)
    ranges = plan_flush(region.meta, committed, entries_max=entries_max)
    if ranges:
        files = await sink.stage(region, ranges)
        await sink.commit(ranges, files)
        await _mark(region, await sink.committed())
    return Flushed(region.id, tuple(ranges))


async def _mark(region: Region, committed: Mapping[TableIncarnation, int]) -> None:
    for (table, incarnation), seq in plan_marks(region.meta, committed):
        try:
            await region.mark_deleted(table, seq, incarnation=incarnation)
        except NotFound:
            pass  # the table was dropped meanwhile
