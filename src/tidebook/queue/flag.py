"""Dead letters: entries that timed out or failed too often."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from tidebook.core.payload import decode_payload
from tidebook.queue.job import date
from tidebook.queue.listed import optional_date
from tidebook.sql.port.queue import Flag


class DeadLetter(msgspec.Struct, frozen=True):
    """An entry that left the queue, and the flag that it raised: retry it, edit it first, or drop it."""

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
    def of(cls, flag: Flag) -> DeadLetter:
        return cls(
            flag.id,
            flag.queue,
            date(flag.raised_at),
            flag.reason,
            flag.key,
            flag.priority,
            flag.timeouts,
            date(flag.inserted_at),
            optional_date(flag.expires_at),
            decode_payload(flag.kind, flag.data),
        )
