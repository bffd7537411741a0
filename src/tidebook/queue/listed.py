"""Entries and queues as one looks at them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import decode_payload
from tidebook.queue.job import date
from tidebook.sql.port.queue import NEVER_MS, Counts, QueueRef, Waiting

LIST_MAX: Final = 1_000_000


class Listed(msgspec.Struct, frozen=True):
    """An entry as it lies in the queue. `status` is W (it waits) or P (it is being processed)."""

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
    def of(cls, row: Waiting) -> Listed:
        return cls(
            row.id,
            row.key,
            row.status,
            row.priority,
            row.timeouts,
            date(row.inserted_at),
            date(row.process_at),
            optional_date(row.expires_at),
            optional_date(row.started_at),
            optional_date(row.lease_until),
            decode_payload(row.kind, row.data),
        )


class Status(msgspec.Struct, frozen=True):
    """A queue in numbers."""

    queue: str
    #: Entries that could be handed out now, held keys included.
    due: int
    #: Entries whose process date is to come.
    later: int
    processing: int
    dead: int
    oldest_due_s: float
    #: The earliest process date of what waits.
    next_at: datetime | None
    #: Period tables that hold entries, or may.
    tables: int

    @property
    def waiting(self) -> int:
        return self.due + self.later

    @classmethod
    def of(cls, ref: QueueRef, counts: Counts) -> Status:
        return cls(
            ref.name,
            counts.due,
            counts.later,
            counts.processing,
            counts.dead,
            counts.oldest_due_ms / 1000,
            optional_date(counts.next_at),
            counts.tables,
        )


def optional_date(ms: int | None) -> datetime | None:
    """A date, or None for never and for none."""
    return None if ms is None or ms == NEVER_MS or ms == 0 else date(ms)


def list_limit(value: int) -> int:
    """Check how many are to be listed at most."""
    if type(value) is not int or not 0 <= value <= LIST_MAX:
        raise InvalidInput(f"a limit is 0 to {LIST_MAX:,}, not {value!r}")
    return value
