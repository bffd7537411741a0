"""Read-only views of entries, dead letters and queues, for listings and status."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import decode_payload
from tidebook.queue.job import utc_datetime
from tidebook.queue.port import NEVER_MS, Counts, DeadLetterRow, QueueRef, WaitingEntry

LIST_MAX: Final = 1_000_000


class EntryView(msgspec.Struct, frozen=True):
    """A waiting or processing entry. `status` is W (waiting) or P (being processed)."""

    id: int
    key: str | None
    status: str
    priority: int
    timeouts: int
    inserted_at: datetime
    process_at: datetime
    expires_at: datetime | None
    started_at: datetime | None
    lease_until: datetime | None
    data: Any

    @classmethod
    def of(cls, row: WaitingEntry) -> EntryView:
        """Build the view of a stored entry."""
        return cls(
            row.id,
            row.key,
            row.status,
            row.priority,
            row.timeouts,
            utc_datetime(row.inserted_at),
            utc_datetime(row.process_at),
            optional_datetime(row.expires_at),
            optional_datetime(row.started_at),
            optional_datetime(row.lease_until),
            decode_payload(row.kind, row.data),
        )


class QueueStatus(msgspec.Struct, frozen=True):
    """The number of entries of a queue, by state."""

    queue: str
    #: Entries whose process date has come, including those whose key is held.
    due: int
    #: Entries whose process date is in the future.
    later: int
    processing: int
    dead: int
    oldest_due_s: float
    #: The earliest process date of a waiting entry.
    next_at: datetime | None
    #: Partitions that may hold entries.
    tables: int

    @property
    def waiting(self) -> int:
        """Return how many entries wait, due or not."""
        return self.due + self.later

    @classmethod
    def of(cls, ref: QueueRef, counts: Counts) -> QueueStatus:
        """Build the status from the store's counts."""
        return cls(
            ref.name,
            counts.due,
            counts.later,
            counts.processing,
            counts.dead,
            counts.oldest_due_ms / 1000,
            optional_datetime(counts.next_at),
            counts.tables,
        )


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter: an entry that left its queue. Retry it, edit it first, or drop it."""

    id: int
    queue: str
    raised_at: datetime
    reason: str
    key: str | None
    priority: int
    timeouts: int
    inserted_at: datetime
    expires_at: datetime | None
    data: Any

    @classmethod
    def of(cls, row: DeadLetterRow) -> DeadLetter:
        """Build the public view of a stored dead letter."""
        return cls(
            row.id,
            row.queue,
            utc_datetime(row.raised_at),
            row.reason,
            row.key,
            row.priority,
            row.timeouts,
            utc_datetime(row.inserted_at),
            optional_datetime(row.expires_at),
            decode_payload(row.kind, row.data),
        )


def optional_datetime(ms: int | None) -> datetime | None:
    """Return a date, or None if there is none or it never comes."""
    return None if ms is None or ms == NEVER_MS or ms == 0 else utc_datetime(ms)


def check_list_limit(value: int) -> int:
    """Return the limit of a listing; raise InvalidInput if it is out of range."""
    if type(value) is not int or not 0 <= value <= LIST_MAX:
        raise InvalidInput(f"a limit is 0 to {LIST_MAX:,}, not {value!r}")
    return value
