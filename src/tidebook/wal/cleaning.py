"""Decide how far a region's log may be truncated, and which tables prevent more.

The decisions are pure functions of the region's state and never become invalid: records that a fold of acknowledged
records does not need, no later fold needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from tidebook.wal.meta import RegionMeta
from tidebook.wal.snapshot import StoredSnapshotChunks

#: How many usable snapshots are retained. The data topic keeps every record after the oldest of them.
SNAPSHOTS_KEPT: Final = 2


class Pinned(msgspec.Struct, frozen=True):
    """A table with entries; its oldest entry keeps the log from being truncated beyond `offset`."""

    table: int
    first_seq: int
    offset: int
    #: The bytes of all tables from that entry on.
    held_bytes: int


#: Called with a table that retains more than `force_flush_bytes`: flush it, then call `mark_deleted`.
OnPinned = Callable[[Pinned], Awaitable[None] | None]


class Cleaned(msgspec.Struct, frozen=True):
    """The result of a cleaning."""

    #: The first offset of the data topic after the cleaning.
    truncated_to: int
    #: How many offsets were removed.
    removed: int
    #: The table that keeps the log from being truncated further; None if no table has entries.
    pinned_by: int | None
    #: How many bytes of the log the tables still need.
    held_bytes: int


class Truncation(msgspec.Struct, frozen=True):
    """The offsets below which the data topic and the meta topic may be truncated."""

    data_before: int
    meta_before: int


def pinned_tables(meta: RegionMeta) -> list[Pinned]:
    """Return the tables with entries, oldest entry first: the first one pins the log."""
    pinned = [
        Pinned(table, table_meta.mapping.start, offset, meta.meter.bytes_from(offset))
        for table, table_meta in meta.tables.items()
        if (offset := table_meta.mapping.first_offset) is not None
    ]
    return sorted(pinned, key=lambda each: (each.offset, each.table))


def copies_needed(stored: Sequence[StoredSnapshotChunks], *, topic_id: str, wanted: int) -> int:
    """Return how many snapshots must be written before the data topic may be truncated at `wanted`."""
    good = sum(1 for each in stored if each.snapshot.topic_id == topic_id and each.snapshot.data_offset >= wanted)
    return max(1, SNAPSHOTS_KEPT - good)


def plan_truncation(stored: Sequence[StoredSnapshotChunks], *, topic_id: str, wanted: int) -> Truncation | None:
    """Return where to truncate: at `wanted`, but not beyond the second-newest snapshot; None with fewer than two.

    Snapshots are ordered by the offset they cover, not by their position in the meta topic, so that a late snapshot of
    a fenced owner never displaces a newer one.
    """
    ours = sorted(
        (each for each in stored if each.snapshot.topic_id == topic_id),
        key=lambda each: (each.snapshot.data_offset, each.first_offset),
    )
    kept = ours[-SNAPSHOTS_KEPT:]
    if len(kept) < SNAPSHOTS_KEPT:
        return None
    return Truncation(min(wanted, kept[0].snapshot.data_offset), min(each.first_offset for each in kept))
