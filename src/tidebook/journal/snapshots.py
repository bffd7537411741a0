"""A snapshot as the application reads it, decoded from the stored one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from tidebook.core.payload import decode_payload
from tidebook.store.port import StoredSnapshot


class Snapshot(msgspec.Struct, frozen=True):
    """An application state as of `seq_nr`."""

    seq_nr: int
    payload: Any
    timestamp_ms: int

    @property
    def timestamp(self) -> datetime:
        """Return when it was saved, by the clock of the process that saved it."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


def read_snapshot(stored: StoredSnapshot) -> Snapshot:
    """Return a stored snapshot with its payload decoded."""
    return Snapshot(stored.seq_nr, decode_payload(stored.payload_type, stored.payload), stored.timestamp_ms)
