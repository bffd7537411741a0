"""What a region tells of itself."""

from __future__ import annotations

import msgspec


class RegionStatus(msgspec.Struct, frozen=True):
    """A region at a glance."""

    region: int
    term: int
    tables: int
    log_start: int
    log_end: int
    held_bytes: int
    pinned_by: int | None
    snapshot_age_ms: int | None
    recovery_s: float
    cleaner_error: str | None
