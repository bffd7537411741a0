"""Where a recovery begins: decided from the snapshots and the log's bounds alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidebook.wal.meta import RegionMeta
from tidebook.wal.snapshot import Snapshot, Stored


class Resume(msgspec.Struct, frozen=True):
    """Restore this snapshot, then scan from where it ends."""

    snapshot: Snapshot


class FullScan(msgspec.Struct, frozen=True):
    """There is no good snapshot, and the log is whole: scan all of it."""


class Lost(msgspec.Struct, frozen=True):
    """Records that are needed are gone: offsets `first` to `last`."""

    first: int
    last: int
    remedy: str


def plan_recovery(stored: Sequence[Stored], *, topic_id: str, log_start: int, log_end: int) -> Resume | FullScan | Lost:
    """The greatest good snapshot, else the whole log, else the range that is lost."""
    if not stored:
        if log_start > 0:
            return Lost(0, log_start - 1, "no snapshot is good, so the whole log is needed: restore the meta topic")
        return FullScan()
    best = max((each.snapshot for each in stored if each.snapshot.topic_id == topic_id), key=_reach, default=None)
    if best is None:
        other = max((each.snapshot for each in stored), key=_reach)
        return Lost(
            other.truncated_to,
            max(other.truncated_to, other.data_offset - 1),
            "the data topic was made again under the same name: restore it, or delete the region's meta topic too",
        )
    if log_end < best.data_offset:
        return Lost(log_end, best.data_offset - 1, "the data topic ends before its snapshot: restore it")
    if log_start > best.data_offset:
        return Lost(best.data_offset, log_start - 1, "only the cleaner may remove records: restore the data topic")
    return Resume(best)


def lost_entries(meta: RegionMeta, log_start: int) -> Lost | None:
    """What tables still need and the log no longer holds."""
    if meta.first_offset >= min(log_start, meta.next_offset):
        return None
    return Lost(meta.first_offset, log_start - 1, "entries that are not marked deleted were in it: restore the topic")


def _reach(snapshot: Snapshot) -> tuple[int, int]:
    return snapshot.data_offset, snapshot.truncated_to
