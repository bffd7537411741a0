"""Read-only views of entries, dead letters and queues, for listings and status."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import decode_payload
from tidebook.queue.job import utc_datetime
from tidebook.queue.port import NEVER_MS, Counts, DeadLetterRow, QueueRef, WaitingEntry, WorkerRow

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
        return cls(**_view_fields(row))


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
    #: Since when the queue is paused, so that nothing is claimed; None if it is not.
    paused_at: datetime | None = None

    @property
    def waiting(self) -> int:
        """Return how many entries wait, due or not."""
        return self.due + self.later

    @classmethod
    def of(cls, ref: QueueRef, counts: Counts) -> QueueStatus:
        """Build the status from the store's counts."""
        due, later, processing, dead, oldest_due_ms, next_at, tables, paused_at = msgspec.structs.astuple(counts)
        dates = optional_datetime(next_at), tables, optional_datetime(paused_at)
        return cls(ref.name, due, later, processing, dead, oldest_due_ms / 1000, *dates)


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a queue, as its last report describes it."""

    id: str
    name: str
    queue: str
    started_at: datetime
    #: When it last reported itself.
    heartbeat_at: datetime
    #: Whether it has been silent for so long that it has probably ended without reporting that.
    gone: bool
    concurrency: int
    #: Entries that it processed when it last reported itself, and those that it finished and failed so far.
    running: int
    done: int
    failed: int

    @classmethod
    def of(cls, queue: str, row: WorkerRow) -> WorkerView:
        """Build the view of a stored report."""
        return cls(
            id=row.id.hex(),
            name=row.name,
            queue=queue,
            started_at=utc_datetime(row.started_at),
            heartbeat_at=utc_datetime(row.reported_at),
            gone=row.gone,
            concurrency=row.concurrency,
            running=row.running,
            done=row.done,
            failed=row.failed,
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
        return cls(**_view_fields(row))


def _view_fields(row: WaitingEntry | DeadLetterRow) -> dict[str, Any]:
    """Return the fields of a stored row with decoded data and dates."""
    fields = msgspec.structs.asdict(row)
    fields["data"] = decode_payload(fields.pop("kind"), row.data)
    for name in ("inserted_at", "process_at", "raised_at"):
        if name in fields:
            fields[name] = utc_datetime(fields[name])
    for name in ("expires_at", "started_at", "lease_until"):
        if name in fields:
            fields[name] = optional_datetime(fields[name])
    return fields


def optional_datetime(ms: int | None) -> datetime | None:
    """Return a date, or None if there is none or it never comes."""
    return None if ms is None or ms == NEVER_MS or ms == 0 else utc_datetime(ms)


def check_list_limit(value: int) -> int:
    """Return the limit of a listing; raise InvalidInput if it is out of range."""
    if type(value) is not int or not 0 <= value <= LIST_MAX:
        raise InvalidInput(f"a limit must be 0 to {LIST_MAX:,}, not {value!r}")
    return value
