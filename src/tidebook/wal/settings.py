"""The settings of a namespace: section [wal] of tidebook.toml."""

from __future__ import annotations

import msgspec

from tidebook.core.errors import InvalidInput


class WalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every bound of a region. What a new region's topics are made with is marked so."""

    #: The largest record, and so the largest write. New topics are made with it.
    limit_bytes: int = 1_000_000
    #: Writes that wait together share a record up to this size.
    pack_bytes: int = 131_072
    #: Records on their way to the log at once.
    in_flight_max: int = 5
    #: Writes that wait beyond this make the next ones wait before they are taken.
    pending_bytes_max: int = 16_777_216
    #: How often the cleaner looks; 0 turns it off.
    clean_every_s: float = 60.0
    #: The cleaner takes a snapshot when so much was written since the last: it bounds a recovery.
    snapshot_every_bytes: int = 67_108_864
    #: A table whose oldest entry holds more than this is offered to the flush callback; 0 turns it off.
    force_flush_bytes: int = 536_870_912
    #: How often a lost claim, or a record that was surely not written, is tried again.
    attempts_max: int = 3

    def __post_init__(self) -> None:
        if not 1_000 <= self.limit_bytes <= 1_000_000_000:
            raise InvalidInput(f"[wal] limit_bytes must be from 1,000 to 1,000,000,000, not {self.limit_bytes:,}")
        for name in ("pack_bytes", "in_flight_max", "pending_bytes_max", "snapshot_every_bytes", "attempts_max"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"[wal] {name} must be at least 1, not {getattr(self, name)}")
        if self.clean_every_s < 0 or self.force_flush_bytes < 0:
            raise InvalidInput("[wal] clean_every_s and force_flush_bytes must not be negative")
