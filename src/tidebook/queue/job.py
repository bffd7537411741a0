"""An entry in a worker's hands."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tidebook.sql.port.queue import NEVER_MS, Claimed, Held

#: Makes user data of what the store holds.
Read = Callable[[Claimed], Any]
_UNREAD: Final = object()


class Job(msgspec.Struct, eq=False, gc=False):
    """What a claim hands out. It is yours until `lease_until`, and `heartbeat` extends that."""

    queue: str
    _claimed: Claimed
    _token: bytes
    _read: Read
    _data: Any = _UNREAD
    #: What a heartbeat has made of it.
    _extended: int | None = None

    @property
    def held(self) -> Held:
        """What proves that one holds it."""
        claimed = self._claimed
        return Held(claimed.keyhash, self._token, claimed.slot, claimed.together)

    @property
    def id(self) -> int:
        """A number that grows with the age of an entry; merged entries keep it."""
        return self._claimed.id

    @property
    def key(self) -> str | None:
        return self._claimed.key

    @property
    def data(self) -> Any:
        """The user data, of the type that went in."""
        if self._data is _UNREAD:
            self._data = self._read(self._claimed)
        return self._data

    @property
    def priority(self) -> int:
        return self._claimed.priority

    @property
    def timeouts(self) -> int:
        """How often it was given back, or not finished in time, since it was last put."""
        return self._claimed.timeouts

    @property
    def inserted_at(self) -> datetime:
        """When it was put, by the clock of who put it."""
        return date(self._claimed.inserted_at)

    @property
    def process_at(self) -> datetime:
        return date(self._claimed.process_at)

    @property
    def expires_at(self) -> datetime | None:
        return None if self._claimed.expires_at == NEVER_MS else date(self._claimed.expires_at)

    @property
    def started_at(self) -> datetime:
        return date(self._claimed.started_at)

    @property
    def lease_until(self) -> datetime:
        return date(self._claimed.lease_until if self._extended is None else self._extended)

    def extended(self, lease_until: int) -> None:
        """A heartbeat came through."""
        self._extended = lease_until

    def __repr__(self) -> str:
        return f"Job({self.queue!r}, key={self.key!r}, priority={self.priority}, timeouts={self.timeouts})"


def date(ms: int) -> datetime:
    """Milliseconds since 1970 as a date in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC)
