"""Pending writes, the in-flight records that carry them, and the result of scanning the log for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.log.port import Acknowledged
from tidebook.wal.entry import Written
from tidebook.wal.meta import Verdict
from tidebook.wal.record import DamagedWalRecord, DataRecord, DropTable, MarkDeleted, Payloads, Write


class PendingWrite:
    """A write to one table that is not acknowledged yet; concurrent ones share a record."""

    __slots__ = ("attempts", "first", "future", "payloads", "size_bytes", "ticket")

    def __init__(self, payloads: Payloads, future: asyncio.Future[Written]) -> None:
        self.payloads = payloads
        self.size_bytes = payloads.size_bytes
        self.future = future
        #: The sequence number of its first payload, assigned when it is sent.
        self.first = 0
        self.attempts = 0
        #: Its position in the order in which writes were accepted.
        self.ticket = 0

    def resolve(self, offset: int) -> None:
        """Resolve the future: the write is valid at `offset`."""
        if not self.future.done():
            first = self.first
            self.future.set_result(Written(first, first + len(self.payloads.values) - 1, offset))


class PendingMultiWrite:
    """A write to several tables that is not acknowledged yet; it is never split over records."""

    __slots__ = ("attempts", "firsts", "future", "payloads", "size_bytes", "ticket")

    def __init__(self, payloads: Sequence[Payloads], future: asyncio.Future[list[Written]]) -> None:
        self.payloads = payloads
        self.size_bytes = sum([each.size_bytes for each in payloads])
        self.future = future
        #: The sequence number of each table's first payload, assigned when the write is sent.
        self.firsts: list[int] = []
        self.attempts = 0
        self.ticket = 0

    def resolve(self, offset: int) -> None:
        """Resolve the future: the write is valid at `offset`."""
        if not self.future.done():
            pairs = zip(self.firsts, self.payloads, strict=True)
            self.future.set_result([Written(first, first + len(each.values) - 1, offset) for first, each in pairs])


class InFlightRecord:
    """A record that was sent; `outcome` is the log's answer, None before it arrives."""

    __slots__ = ("calls", "future", "outcome", "record", "size_bytes", "ticket")

    def __init__(
        self,
        record: Write | MarkDeleted | DropTable,
        size_bytes: int,
        calls: Sequence[PendingWrite | PendingMultiWrite],
        future: asyncio.Future[int] | None,
        *,
        ticket: int,
    ) -> None:
        self.record = record
        self.size_bytes = size_bytes
        self.calls = calls
        #: The future of a control record, resolved with its offset; None for a record of writes.
        self.future = future
        self.outcome: Acknowledged | TidebookError | None = None
        #: The ticket of the first write in it.
        self.ticket = ticket

    def resolve(self, offset: int) -> None:
        """Resolve all futures of the record: it is valid at `offset`."""
        for call in self.calls:
            call.resolve(offset)
        if self.future is not None and not self.future.done():
            self.future.set_result(offset)

    def fail(self, error: TidebookError) -> None:
        """Fail all futures of the record: it is not valid, or its outcome is unknown."""
        for call in self.calls:
            if not call.future.done():
                call.future.set_exception(error)
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)


class ScanResult:
    """The valid records of this writer that a scan of the log found; pass it to the scan as `on_record`."""

    def __init__(self, writer: bytes) -> None:
        self._writer = writer
        self._writes: dict[tuple[int, int, int], int] = {}
        self._seen: set[int] = set()
        #: Where the scan restarted because a cleaner had truncated the log: earlier records may have been missed.
        self.scanned_from = 0

    def __call__(self, offset: int, record: DataRecord | DamagedWalRecord, verdict: Verdict) -> None:
        self._seen.add(offset)
        if verdict is Verdict.VALID:
            self.add(offset, record)

    def add(self, offset: int, record: DataRecord | DamagedWalRecord) -> None:
        """Add a valid record; records of other writers are ignored."""
        if isinstance(record, Write) and record.writer == self._writer:
            self._writes[_identity(record)] = offset

    def offset_of(self, flight: InFlightRecord) -> int | None:
        """Return the offset at which the record is valid; None if it was not found valid."""
        if isinstance(flight.record, Write):
            return self._writes.get(_identity(flight.record))
        if isinstance(flight.outcome, Acknowledged):
            offset = flight.outcome.offset
            return offset if offset < self.scanned_from or offset in self._seen else None
        return None

    def may_have_missed(self, flight: InFlightRecord) -> bool:
        """Return whether the record may be in the truncated part of the log, which the scan could not read."""
        if not self.scanned_from or self.offset_of(flight) is not None:
            return False
        match flight.outcome:
            case Acknowledged(offset=offset):
                return offset < self.scanned_from
            case Unavailable():
                return False
            case _:
                return True


def _identity(write: Write) -> tuple[int, int, int]:
    """Return what identifies a record of a writer: under one claim, a sequence number is assigned once."""
    return write.term, write.parts[0].table, write.parts[0].first
