"""Pending writes, the in-flight records that carry them, and their outcomes as read from the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from tidebook.core.errors import LogLost, OutcomeUnknown, TidebookError, Unavailable
from tidebook.log.port import Acknowledged
from tidebook.runtime.futures import resolve_future
from tidebook.wal.meta import RegionMeta, TableMeta, Verdict
from tidebook.wal.record import (
    DamagedWalRecord,
    DataRecord,
    DropTable,
    MarkDeleted,
    Payloads,
    Write,
    Written,
    read_record,
)
from tidebook.wal.topics import RegionTopics


class PendingWrite:
    """A write to one or more tables, or a mark or drop (`control`), that was accepted and is not resolved yet."""

    __slots__ = ("attempts", "control", "firsts", "future", "payloads", "size_bytes", "ticket")

    def __init__(
        self,
        payloads: Sequence[Payloads],
        control: MarkDeleted | DropTable | None,
        future: asyncio.Future[list[Written]],
        *,
        size_bytes: int,
        ticket: int,
    ) -> None:
        #: Concurrent writes share a record, but one write is never split over records.
        self.payloads = payloads
        self.control = control
        self.future = future
        self.size_bytes = size_bytes
        #: Its position in the order in which writes were accepted.
        self.ticket = ticket
        #: The sequence number of the first payload of each table, assigned when it is sent.
        self.firsts: list[int] = []
        self.attempts = 0


class InFlightRecord:
    """A record that was sent, with the writes in it; `outcome` is the log's answer, None before it arrives."""

    __slots__ = ("calls", "is_control", "outcome", "record", "size_bytes")

    def __init__(self, record: Write | MarkDeleted | DropTable, size_bytes: int, calls: Sequence[PendingWrite]) -> None:
        self.record = record
        self.is_control = not isinstance(record, Write)
        self.size_bytes = size_bytes
        self.calls = calls
        self.outcome: Acknowledged | TidebookError | None = None

    def resolve(self, offset: int) -> None:
        """Resolve all futures of the record: it is valid at `offset`."""
        for call in self.calls:
            if not call.future.done():
                pairs = zip(call.firsts, call.payloads, strict=True)
                call.future.set_result([Written(first, first + len(each.values) - 1, offset) for first, each in pairs])

    def fail(self, error: TidebookError) -> None:
        """Fail all futures of the record: it is not valid, or its outcome is unknown."""
        for call in self.calls:
            resolve_future(call.future, error)


class OutcomeScan:
    """The valid records of this writer that a scan of the log finds; pass it to the scan as `on_record`.

    Create it before the scan: it remembers the incarnations of the tables that in-flight writes refer to.
    """

    def __init__(self, topics: RegionTopics, meta: RegionMeta, writer: bytes, in_flight: Iterable[InFlightRecord]):
        self._topics = topics
        self._meta = meta
        self._writer = writer
        self._in_flight = in_flight
        self._writes: dict[tuple[int, int, int], int] = {}
        self._seen: set[int] = set()
        self._restored_at = meta.restored_at
        #: Where the scan restarted because a cleaner had truncated the log: earlier records may have been missed.
        self._scanned_from = 0
        tables = {flight.record.parts[0].table for flight in in_flight if isinstance(flight.record, Write)}
        self._incarnations = {table: meta.tables[table].incarnation for table in tables if table in meta.tables}

    def __call__(self, offset: int, record: DataRecord | DamagedWalRecord, verdict: Verdict) -> None:
        self._seen.add(offset)
        if verdict is Verdict.VALID:
            self._add(offset, record)

    def _add(self, offset: int, record: DataRecord | DamagedWalRecord) -> None:
        if isinstance(record, Write) and record.writer == self._writer:
            self._writes[_identity(record)] = offset

    def offset_of(self, flight: InFlightRecord) -> int | None:
        """Return the offset at which the record is valid; None if it was not found valid."""
        if isinstance(flight.record, Write):
            return self._writes.get(_identity(flight.record))
        if isinstance(flight.outcome, Acknowledged):
            offset = flight.outcome.offset
            return offset if offset < self._scanned_from or offset in self._seen else None
        return None

    async def look_up_truncated(self) -> dict[InFlightRecord, OutcomeUnknown]:
        """Look up the records that the scan may have missed in a truncated part of the log, by their tables' mappings.

        Return those whose outcome cannot be determined. Numbers of another incarnation of a table prove nothing.
        """
        unknown: dict[InFlightRecord, OutcomeUnknown] = {}
        if self._meta.restored_at == self._restored_at:
            return unknown
        self._scanned_from = self._meta.restored_at
        for flight in self._in_flight:
            if not isinstance(flight.record, Write):
                continue
            part = flight.record.parts[0]
            table_meta = self._meta.tables.get(part.table)
            known = True
            if self._may_have_missed(flight):
                if table_meta is not None and table_meta.incarnation == self._incarnations.get(part.table):
                    known = await self._look_up_in_table(table_meta, flight, flight.record)
                else:  # dropped or created meanwhile: only finding the record proves its outcome
                    await self._add_record_at(None if table_meta is None else table_meta.mapping.get(part.first))
                    known = self.offset_of(flight) is not None
            if table_meta is not None and table_meta.incarnation == self.offset_of(flight):
                self._incarnations[part.table] = table_meta.incarnation  # this record created the table
            if not known:
                unknown[flight] = OutcomeUnknown(
                    f"{self._topics.data}: table {part.table} was cleaned beyond number {part.first}, so it is unknown "
                    "whether that was written: it will not be written later"
                )
        return unknown

    def _may_have_missed(self, flight: InFlightRecord) -> bool:
        if self.offset_of(flight) is not None or isinstance(flight.outcome, Unavailable):
            return False
        return not isinstance(flight.outcome, Acknowledged) or flight.outcome.offset < self._scanned_from

    async def _look_up_in_table(self, table_meta: TableMeta, flight: InFlightRecord, write: Write) -> bool:
        """Look the record up in the table it was written to; return whether its outcome is known now."""
        first = write.parts[0].first
        if first >= table_meta.next_seq_num:
            return True  # the number was never assigned, so the record is not valid
        if first >= table_meta.mapping.start:
            return await self._add_record_at(table_meta.mapping[first])
        if self._meta.writer == self._writer and isinstance(flight.outcome, Acknowledged):
            # Already marked deleted. No other writer held the claim, so the number was assigned to this record.
            self._add(flight.outcome.offset, write)
            return True
        return False

    async def _add_record_at(self, offset: int | None) -> bool:
        """Add the valid record at an offset; return False if the log no longer has it."""
        if offset is None:
            return False
        try:
            page = await self._topics.read(start=offset, stop=offset + 1)
        except LogLost:
            return False  # marked deleted and truncated just now
        for record in page.records:
            self._add(record.offset, read_record(record.value))
        return bool(page.records)


def _identity(write: Write) -> tuple[int, int, int]:
    """Return what identifies a record of a writer: under one claim, a sequence number is assigned once."""
    return write.term, write.parts[0].table, write.parts[0].first
