"""A claimed entry, as its handler sees it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic

import msgspec

from tidebook.queue.port import NEVER_MS, Claimed, LeasedEntry

if TYPE_CHECKING:  # the default makes an annotation without a type mean any data
    from typing_extensions import TypeVar

    D = TypeVar("D", default=Any)
else:
    from typing import TypeVar

    D = TypeVar("D")

#: Decodes the user data of a claimed entry.
Decode = Callable[[Claimed], Any]
_NOT_DECODED: Final = object()


class Job(msgspec.Struct, Generic[D], eq=False, gc=False):
    """A claimed entry with data of type `D`. Its worker holds it until `lease_until`; `heartbeat` extends the lease."""

    queue: str
    _claimed: Claimed
    _decode: Decode
    _data: Any = _NOT_DECODED
    #: The end of the lease after the last heartbeat.
    _extended_until: int | None = None

    @property
    def held(self) -> LeasedEntry:
        """Return the hash and token that prove the lease to the store."""
        return self._claimed.held

    @property
    def id(self) -> int:
        """Return the entry's id; newer entries have larger ones, and a merged entry keeps the older id."""
        return self._claimed.id

    @property
    def key(self) -> str | None:
        return self._claimed.key

    @property
    def data(self) -> D:
        """Return the user data, as an object of the class that declares the queue's fields, if one does."""
        if self._data is _NOT_DECODED:
            self._data = self._decode(self._claimed)
        found: D = self._data
        return found

    @property
    def priority(self) -> int:
        return self._claimed.priority

    @property
    def timeouts(self) -> int:
        """Return how many times the entry failed or its lease expired since it was last put."""
        return self._claimed.timeouts

    @property
    def inserted_at(self) -> datetime:
        """Return when the entry was put, by the clock of the process that put it."""
        return utc_datetime(self._claimed.inserted_at)

    @property
    def process_at(self) -> datetime:
        return utc_datetime(self._claimed.process_at)

    @property
    def expires_at(self) -> datetime | None:
        return None if self._claimed.expires_at == NEVER_MS else utc_datetime(self._claimed.expires_at)

    @property
    def traceparent(self) -> str | None:
        """Return the trace context of the put, as W3C writes it; None if the put was not traced."""
        return self._claimed.trace

    @property
    def started_at(self) -> datetime:
        return utc_datetime(self._claimed.started_at)

    @property
    def lease_until(self) -> datetime:
        return utc_datetime(self._claimed.lease_until if self._extended_until is None else self._extended_until)

    def extended(self, lease_until: int) -> None:
        """Record the new end of the lease after a heartbeat."""
        self._extended_until = lease_until

    def __repr__(self) -> str:
        return f"Job({self.queue!r}, key={self.key!r}, priority={self.priority}, timeouts={self.timeouts})"


def utc_datetime(ms: int) -> datetime:
    """Return milliseconds since 1970 as a datetime in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC)
