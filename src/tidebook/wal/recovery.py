"""Decide where a recovery starts, from the stored snapshots and the bounds of the log alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidebook.wal.meta import RegionMeta
from tidebook.wal.snapshot import RegionSnapshot, StoredSnapshotChunks


class Resume(msgspec.Struct, frozen=True):
    """Restore this snapshot, then scan the log from its `data_offset`."""

    snapshot: RegionSnapshot


class FullScan(msgspec.Struct, frozen=True):
    """Scan the whole log: there is no usable snapshot, and the log is complete."""


class EntriesLost(msgspec.Struct, frozen=True):
    """Records that are still needed are missing from the log: offsets `first` to `last`, inclusive."""

    first: int
    last: int
    remedy: str


def plan_recovery(
    stored: Sequence[StoredSnapshotChunks], *, topic_id: str, log_start: int, log_end: int
) -> Resume | FullScan | EntriesLost:
    """Choose the snapshot that reaches furthest, else a full scan; return the lost range if neither is complete."""
    if not stored:
        if log_start > 0:
            return EntriesLost(
                0, log_start - 1, "there is no usable snapshot, so the whole log is needed: restore the meta topic"
            )
        return FullScan()
    best = max((each.snapshot for each in stored if each.snapshot.topic_id == topic_id), key=_reach, default=None)
    if best is None:
        other = max((each.snapshot for each in stored), key=_reach)
        return EntriesLost(
            other.truncated_to,
            max(other.truncated_to, other.data_offset - 1),
            "the data topic was made again under the same name: restore it, or delete the region's meta topic too",
        )
    if log_end < best.data_offset:
        return EntriesLost(log_end, best.data_offset - 1, "the data topic ends before its snapshot: restore it")
    if log_start > best.data_offset:
        return EntriesLost(
            best.data_offset, log_start - 1, "only the cleaner may remove records: restore the data topic"
        )
    return Resume(best)


def lost_entries(meta: RegionMeta, log_start: int) -> EntriesLost | None:
    """Return the range of records that tables still need but the log no longer has; None if nothing is missing."""
    if meta.first_offset >= min(log_start, meta.next_offset):
        return None
    return EntriesLost(
        meta.first_offset, log_start - 1, "entries that are not marked deleted were in it: restore the topic"
    )


def _reach(snapshot: RegionSnapshot) -> tuple[int, int]:
    return snapshot.data_offset, snapshot.truncated_to
