"""What the cleaner may remove, and who keeps it from removing more: decided from a snapshot alone.

A decision never grows old: what a fold of verified records no longer needs, no later fold needs either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tidebook.wal.meta import RegionMeta
from tidebook.wal.snapshot import Stored

#: So many good snapshots stay, and the data topic reaches back to the oldest of them.
SNAPSHOTS_KEPT: Final = 2


class Pinned(msgspec.Struct, frozen=True):
    """A table whose oldest entry keeps the log from being cleaned."""

    table: int
    first_seq: int
    offset: int
    #: What lies at or behind that entry, of all tables.
    held_bytes: int


class Cut(msgspec.Struct, frozen=True):
    """How far data and meta topic may be cut; what lies below goes."""

    data_before: int
    meta_before: int


def pinned_tables(meta: RegionMeta) -> list[Pinned]:
    """The tables by the age of their oldest entry, the one that pins the log first."""
    pinned = [
        Pinned(table, held.mapping.start, offset, meta.meter.bytes_from(offset))
        for table, held in meta.tables.items()
        if (offset := held.mapping.first_offset) is not None
    ]
    return sorted(pinned, key=lambda each: (each.offset, each.table))


def copies_needed(stored: Sequence[Stored], *, topic_id: str, wanted: int) -> int:
    """How many snapshots must be written before the data topic may be cut at `wanted`."""
    good = sum(1 for each in stored if each.snapshot.topic_id == topic_id and each.snapshot.data_offset >= wanted)
    return max(1, SNAPSHOTS_KEPT - good)


def decide_cut(stored: Sequence[Stored], *, topic_id: str, wanted: int) -> Cut | None:
    """Cut at `wanted`, or as far as the older of the two furthest snapshots reaches; None with fewer than two.

    Furthest by the fold, not by the place in the meta topic: a zombie's late snapshot never drives out a newer one.
    """
    ours = sorted(
        (each for each in stored if each.snapshot.topic_id == topic_id),
        key=lambda each: (each.snapshot.data_offset, each.first_offset),
    )
    kept = ours[-SNAPSHOTS_KEPT:]
    if len(kept) < SNAPSHOTS_KEPT:
        return None
    return Cut(
        data_before=min(wanted, kept[0].snapshot.data_offset), meta_before=min(each.first_offset for each in kept)
    )
