"""Dead letters: entries that timed out or failed too often and left the queue."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from tidebook.core.payload import decode_payload
from tidebook.queue.job import utc_datetime
from tidebook.queue.port import DeadLetterRow
from tidebook.queue.views import optional_datetime


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
