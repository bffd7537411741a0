"""The settings of write-ahead logs: section [wal] of tidebook.toml."""

from __future__ import annotations

import msgspec

from tidebook.core.errors import InvalidInput


class WalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits and intervals of a region."""

    #: The largest record, and therefore the largest write. New topics are created with this limit.
    limit_bytes: int = 1_000_000
    #: Group commit packs concurrent writes into one record up to this size.
    pack_bytes: int = 131_072
    #: How many records may be in flight to the log.
    in_flight_max: int = 5
    #: Backpressure: a write waits while more bytes than this are pending.
    pending_bytes_max: int = 16_777_216
    #: The interval of the periodic cleaning; 0 disables it.
    clean_every_s: float = 60.0
    #: The periodic cleaning writes a snapshot after this many bytes, which bounds the scan of a recovery.
    snapshot_every_bytes: int = 67_108_864
    #: A table whose oldest entry retains more of the log than this is passed to `on_pinned`; 0 disables it.
    force_flush_bytes: int = 536_870_912
    #: How often a claim, a mark or a write is sent if the log does not accept it, including the first attempt.
    attempts_max: int = 3

    def __post_init__(self) -> None:
        if not 1_000 <= self.limit_bytes <= 1_000_000_000:
            raise InvalidInput(f"[wal] limit_bytes must be from 1,000 to 1,000,000,000, not {self.limit_bytes:,}")
        for name in ("pack_bytes", "in_flight_max", "pending_bytes_max", "snapshot_every_bytes", "attempts_max"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"[wal] {name} must be at least 1, not {getattr(self, name)}")
        if self.clean_every_s < 0 or self.force_flush_bytes < 0:
            raise InvalidInput("[wal] clean_every_s and force_flush_bytes must not be negative")
