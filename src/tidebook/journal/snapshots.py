"""Snapshots: states that an app saves of its journals, in a few slots, each bound to one life of a journal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from tidebook.core.payload import decode_payload
from tidebook.store.port import Snapshot as Kept


class Snapshot(msgspec.Struct, frozen=True):
    """A saved state, as of `seq_nr`."""

    seq_nr: int
    payload: Any
    timestamp_ms: int

    @property
    def timestamp(self) -> datetime:
        """When it was saved, by the clock of who saved it."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


def read_snapshot(kept: Kept) -> Snapshot:
    """A kept snapshot with its payload decoded."""
    return Snapshot(kept.seq_nr, decode_payload(kept.payload_type, kept.payload), kept.timestamp_ms)
