"""Requests and responses of write-ahead logs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidebook.api.payload import payload_from, payload_to
from tidebook.core.bounds import COUNTER_MAX, NUMBER_MAX
from tidebook.wal.record import WalEntry

WRITES_MAX = 1_000
PAYLOADS_MAX = 10_000

Table = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Sequence = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]


class RegionsResponse(msgspec.Struct, frozen=True):
    """The ids of the regions of a namespace."""

    regions: list[int]


class TableResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one table of a region."""

    table: int
    incarnation: int
    next_seq_num: int
    latest_marked_deleted: int
    current_high_watermark: int
    entries: int


class RegionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a region and its tables."""

    region: int
    term: int
    log_start: int
    log_end: int
    held_bytes: int
    pinned_by: int | None
    snapshot_age_ms: int | None
    recovery_s: float
    cleaner_error: str | None
    tables: list[TableResponse]


class RegionOpenBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a missing region is created."""

    create: bool = False


class RegionSessionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A claim of a region for writing; it ends when it is closed, taken over, or idle for `idle_s` seconds."""

    session: str
    term: int
    idle_s: float
    tables: list[TableResponse]


class PayloadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One payload: `payload` (a JSON value or text) or `payload_base64` (bytes)."""

    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET

    def value(self) -> Any:
        """Return the payload itself."""
        return payload_from(self.payload, self.payload_base64)

    @classmethod
    def of(cls, value: Any) -> PayloadBody:
        """Return the request form of a payload."""
        return cls(*payload_to(value))


class TableWriteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payloads for one table."""

    table: Table
    payloads: Annotated[tuple[PayloadBody, ...], Meta(min_length=1, max_length=PAYLOADS_MAX)]


class RegionWriteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payloads to write under a session, to one or more tables, atomically and in order."""

    session: str
    writes: Annotated[tuple[TableWriteBody, ...], Meta(min_length=1, max_length=WRITES_MAX)]


class WriteResponse(msgspec.Struct, frozen=True):
    """The sequence numbers of one table's payloads, and the offset of their record."""

    table: int
    first: int
    last: int
    offset: int


class RegionWriteResponse(msgspec.Struct, frozen=True):
    """One result for each table, in the order of the request."""

    written: list[WriteResponse]


class RegionReadQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selects the entries to read: those of one table from `start` on, or of all tables from an offset on."""

    table: Table | None = None
    start: Sequence = 1
    from_offset: Sequence = 0
    limit: Annotated[int, Meta(ge=1, le=PAYLOADS_MAX)] | None = None


class WalEntryLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One entry of a table."""

    table: int
    seq: int
    offset: int
    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET

    @classmethod
    def of(cls, entry: WalEntry, payload: Any) -> WalEntryLine:
        """Return the line of an entry, with its payload as clients see it."""
        return cls(entry.table, entry.seq, entry.offset, *payload_to(payload))


class MarkBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table whose entries below `seq` are no longer needed."""

    table: Table
    seq: Sequence
    incarnation: Sequence | None = None


class FlushBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The table to flush; without it all tables with entries."""

    table: Table | None = None


class FlushResponse(msgspec.Struct, frozen=True):
    """The tables that the owner was asked to flush."""

    tables: list[int]


class CleanResponse(msgspec.Struct, frozen=True):
    """The result of cleaning a region."""

    truncated_to: int
    removed: int
    pinned_by: int | None
    held_bytes: int


class RegionSnapshotResponse(msgspec.Struct, frozen=True):
    """The snapshot that was written."""

    data_offset: int
    truncated_to: int
    tables: int
