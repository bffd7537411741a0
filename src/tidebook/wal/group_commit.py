"""Group commit: the owner packs concurrent writes of many tables into records and sends them in a pipeline.

A record is valid if it is acknowledged at the next expected offset: no other writer's record precedes it then. After
anything else (a gap between two acknowledgements, a failure, an unknown outcome) nothing more is sent until a repair
has read from the log which records are valid.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import msgspec

from tidebook.core.errors import Fenced, LogLost, NotFound, OutcomeUnknown, TidebookError, TooLarge, Unavailable
from tidebook.log.port import Acknowledged, Outgoing
from tidebook.runtime.futures import resolve_future
from tidebook.runtime.process import generation, refuse_fork
from tidebook.wal.meta import RegionMeta, TableMeta, Verdict, fold
from tidebook.wal.record import (
    Control,
    DamagedWalRecord,
    DataRecord,
    DropTable,
    OwnerClaim,
    Payloads,
    Write,
    Written,
    encode_control,
    encode_write,
    read_record,
    record_bytes_max,
)
from tidebook.wal.topics import PARTITION, RegionTopics


class PendingWrite(msgspec.Struct, eq=False):
    """A write to one or more tables, or a control record, that was accepted and is not resolved yet."""

    #: Concurrent writes share a record, but one write is never split over records.
    payloads: Sequence[Payloads]
    control: Control | None
    future: asyncio.Future[list[Written]]
    size_bytes: int
    #: The sequence number of the first payload of each table, assigned when it is sent.
    firsts: list[int] = []
    attempts: int = 0


class InFlightRecord(msgspec.Struct, eq=False):
    """A record that was sent, with the writes in it; `outcome` is None until the log responds."""

    record: Write | Control
    size_bytes: int
    calls: Sequence[PendingWrite]
    outcome: Acknowledged | TidebookError | None = None

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
    """Collects this writer's valid records during a scan of the log; pass it to the scan as `on_record`.

    Create it before the scan: it remembers the incarnations of the tables that in-flight writes refer to.
    """

    def __init__(self, topics: RegionTopics, meta: RegionMeta, writer: bytes, in_flight: Iterable[InFlightRecord]):
        self._topics = topics
        self._meta = meta
        self._writer = writer
        self._in_flight = in_flight
        self._writes: dict[tuple[int, int, int], int] = {}
        self._seen: set[int] = set()
        self._restored_offset = meta.restored_offset
        #: The offset at which the scan restarted after a cleaner truncated the log: it may have missed earlier records.
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
        if self._meta.restored_offset != self._restored_offset:
            self._scanned_from = self._meta.restored_offset
        for flight in self._in_flight if self._scanned_from else ():
            if not isinstance(flight.record, Write):
                continue
            part = flight.record.parts[0]
            table_meta = self._meta.tables.get(part.table)
            known = True
            if self._may_have_missed(flight):
                if table_meta is not None and table_meta.incarnation == self._incarnations.get(part.table):
                    known = await self._look_up_in_table(table_meta, flight, flight.record)
                elif table_meta is not None and table_meta.incarnation == _acknowledged_at(flight):
                    self._add(table_meta.incarnation, flight.record)  # the record at this offset created the table
                else:  # dropped or created meanwhile: only finding the record proves its outcome
                    await self._add_record_at(None if table_meta is None else table_meta.mapping.get(part.first))
                    known = self.offset_of(flight) is not None
            if table_meta is not None and table_meta.incarnation == self.offset_of(flight):
                self._incarnations[part.table] = table_meta.incarnation  # this record created the table
            if not known:
                unknown[flight] = OutcomeUnknown(
                    f"{self._topics.data}: table {part.table} was cleaned beyond number {part.first}, so it is unknown "
                    "whether that entry was written; it will not be written later"
                )
        return unknown

    def _may_have_missed(self, flight: InFlightRecord) -> bool:
        if self.offset_of(flight) is not None or isinstance(flight.outcome, Unavailable):
            return False
        if not isinstance(flight.outcome, Acknowledged):
            return True
        is_fenced = self._meta.writer != self._writer and flight.outcome.offset > self._meta.claimed_at
        return flight.outcome.offset < self._scanned_from and not is_fenced

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


def _acknowledged_at(flight: InFlightRecord) -> int | None:
    return flight.outcome.offset if isinstance(flight.outcome, Acknowledged) else None


def _identity(write: Write) -> tuple[int, int, int]:
    """Return a key that identifies a record of a writer: under one claim, a sequence number is assigned once."""
    return write.term, write.parts[0].table, write.parts[0].first


class GroupCommit:
    """Sends the owner's writes to the data topic, and folds each acknowledged record into `meta`."""

    def __init__(self, topics: RegionTopics, meta: RegionMeta, count: Callable[[str], None]) -> None:
        self.meta = meta
        self.fenced: Fenced | None = None
        self._closing: Fenced | None = None
        self._topics = topics
        self._term, self._writer = meta.term, meta.writer
        self._settings = settings = topics.settings
        #: Increments the counter of this name.
        self._count = count
        self._generation = generation()
        self._payloads_bytes_max = settings.limit_bytes - record_bytes_max(0)
        self._pack_bytes = min(settings.pack_bytes, self._payloads_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._pending: deque[PendingWrite] = deque()
        self._pending_bytes = 0
        self._in_flight: deque[InFlightRecord] = deque()
        #: The next sequence number of each table with numbers that are assigned but not folded into the meta yet.
        self._next_seqs: dict[int, int] = {}
        self._scheduled = False
        #: Whether the log must be read before anything more is sent.
        self._stale = False
        #: Whether a caller got an unknown outcome: a new claim must then fence records that may still arrive.
        self._must_claim = False
        self._repairing: asyncio.Task[TidebookError | None] | None = None
        self._changed = asyncio.Event()

    async def write(self, payloads: Sequence[Payloads] = (), *, control: Control | None = None) -> list[Written]:
        """Write payloads to their tables in one record, or a control record; return when the record is valid.

        Wait first while more than `pending_bytes_max` bytes are pending. The log keeps the order of the calls.
        """
        size_bytes = payloads[0].size_bytes if len(payloads) == 1 else sum([each.size_bytes for each in payloads])
        if size_bytes > self._payloads_bytes_max:
            limit_bytes = self._settings.limit_bytes
            raise TooLarge("the write", size_bytes=record_bytes_max(size_bytes), limit_bytes=limit_bytes)
        while self._pending_bytes > self._settings.pending_bytes_max and not (self.fenced or self._closing):
            await self._wait_for_change()
        refuse_fork(self._generation, self._topics.data)  # in a forked child no event loop would send it
        if refused := self.fenced or self._closing:
            raise Fenced(str(refused))
        future: asyncio.Future[list[Written]] = asyncio.Future(loop=self._loop)
        self._pending.append(PendingWrite(payloads, control, future, size_bytes))
        self._pending_bytes += size_bytes
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._send_pending)
        return await future

    async def wait_resolved(self) -> None:
        """Wait until everything accepted so far is resolved; do not wait for later writes."""
        accepted = set(self._unresolved())
        while not accepted.isdisjoint(self._unresolved()):
            await self._wait_for_change()

    def _unresolved(self) -> Iterator[PendingWrite]:
        return chain(chain.from_iterable(flight.calls for flight in self._in_flight), self._pending)

    async def catch_up(self) -> None:
        """Fold all records that the data topic has now, including those of other processes, while writes continue."""
        end = await self._topics.end()
        if end < self.meta.next_offset and not self._in_flight:
            await self.rescan()  # the log ends below the folded offset: `rescan` raises if the topic was created again
        while self.meta.next_offset < end:
            if self._in_flight or self._repairing is not None:
                # An acknowledgement advances the meta, or shows that another writer's record is in between.
                await self._wait_for_change()
            else:
                await self.rescan()
                return

    async def rescan(self) -> None:
        """Stop sending, and fold all records up to the end of the data topic."""
        self._stale = True
        while self._repairing is not None:
            await asyncio.shield(self._repairing)
        error = await asyncio.shield(self._start_repair(to_end=True))
        if error is not None:
            raise error

    async def close(self) -> None:
        """Refuse new writes, and wait until the accepted ones are resolved."""
        self._closing = Fenced(f"{self._topics.data}: this region object is closed: open the region again")
        self._changed.set()  # wake the writes that wait for room
        while self._pending or self._in_flight or self._repairing:
            await self._wait_for_change()
        if self.fenced is None:
            self.fenced = self._closing

    # Sending

    def _send_pending(self) -> None:
        self._scheduled = False
        if self._stale or self._repairing is not None:
            if self._repairing is None and self._pending:
                self._start_repair()
            return
        while self._pending and len(self._in_flight) < self._settings.in_flight_max:
            self._send_record()

    def _send_record(self) -> None:
        """Send one record: as many pending writes as `pack_bytes` allows, or one control record."""
        pending = self._pending
        calls: list[PendingWrite] = []
        size_bytes = 0
        while pending:
            call = pending[0]
            if calls and (call.control or calls[0].control or size_bytes + call.size_bytes > self._pack_bytes):
                break
            pending.popleft()
            self._pending_bytes -= call.size_bytes
            if not call.future.done():  # otherwise its caller was cancelled before it was sent
                size_bytes += call.size_bytes
                calls.append(call)
        self._changed.set()
        if not calls:
            return
        control = calls[0].control
        record: Write | Control
        if control is None:
            record, value = encode_write(self._term, self._writer, self._number_parts(calls))
        else:
            record, value = control, encode_control(control)
            if isinstance(control, DropTable):
                self._next_seqs[control.table] = 1
        flight = InFlightRecord(record, len(value), calls)
        self._in_flight.append(flight)
        self._topics.log.send(Outgoing(self._topics.data, PARTITION, None, value), partial(self._on_sent, flight))

    def _number_parts(self, calls: Sequence[PendingWrite]) -> list[tuple[int, Payloads]]:
        """Assign sequence numbers, and return the parts of the record in the order of the calls."""
        parts: list[tuple[int, Payloads]] = []
        for call in calls:
            call.firsts = []
            for payloads in call.payloads:
                first = self._next_seqs.get(payloads.table)
                if first is None:
                    table_meta = self.meta.tables.get(payloads.table)
                    first = 1 if table_meta is None else table_meta.next_seq_num
                self._next_seqs[payloads.table] = first + len(payloads.values)
                call.firsts.append(first)
                parts.append((first, payloads))
        return parts

    def _on_sent(self, flight: InFlightRecord, outcome: Acknowledged | TidebookError) -> None:
        """Fold and resolve a record acknowledged at the expected offset; start a repair for any other outcome."""
        flight.outcome = outcome
        if (
            self._repairing is None
            and not self._stale
            and isinstance(outcome, Acknowledged)
            and outcome.offset == self.meta.next_offset
            and self._in_flight[0] is flight
        ):
            verdict = fold(self.meta, outcome.offset, flight.size_bytes, flight.record)
            if verdict is Verdict.VALID or not isinstance(flight.record, Write):
                self._in_flight.popleft()
                flight.resolve(outcome.offset)
                self._count("wal_records")
                if self._pending:
                    self._send_pending()
                self._changed.set()
                return
        self._stale = True
        if self._repairing is None:
            self._start_repair()
        self._changed.set()

    # Repair

    def _start_repair(self, *, to_end: bool = False) -> asyncio.Task[TidebookError | None]:
        self._repairing = self._loop.create_task(self._repair(to_end=to_end))
        return self._repairing

    async def _repair(self, *, to_end: bool) -> TidebookError | None:
        """Wait for all outcomes, read from the log which in-flight records are valid, then resume sending."""
        try:
            while any(flight.outcome is None for flight in self._in_flight):
                await self._wait_for_change()
            await self._reconcile(to_end=to_end)
            self._stale = False
        except TidebookError as error:
            self._fail_in_flight(error)
            return error
        finally:
            self._repairing = None
            self._changed.set()
            if self._pending and not self._stale and self.fenced is None:
                self._send_pending()
        return self.fenced

    async def _reconcile(self, *, to_end: bool) -> None:
        """Scan the log for the in-flight records, claim a new term if one is absent, and resolve all of them."""
        if self.fenced is not None:
            raise Fenced(str(self.fenced))
        try:
            await self._topics.check_incarnation()
        except NotFound as error:
            self.fenced = Fenced(str(error))
            raise self.fenced from error
        scan = OutcomeScan(self._topics, self.meta, self._writer, self._in_flight)
        acked = [flight.outcome.offset for flight in self._in_flight if isinstance(flight.outcome, Acknowledged)]
        stop = max(acked, default=-1) + 1
        if to_end:
            stop = max(stop, await self._topics.end())
        await self._topics.follow(self.meta, stop=stop, on_record=scan)
        absent = any(scan.offset_of(flight) is None for flight in self._in_flight)
        if self._holds_claim() and (absent or self._must_claim):
            # Only a new claim guarantees that a record which is absent now never becomes valid.
            claim = OwnerClaim(self._term + 1, self._writer)
            await self._topics.append_claim(self.meta, claim, on_record=scan)
            self._count("wal_claims")
            self._holds_claim()
        unknown = await scan.look_up_truncated()
        self._must_claim = False
        self._resolve_in_flight(scan, unknown)

    def _holds_claim(self) -> bool:
        """Return whether this writer's claim is in force, and adopt its term; if it is not, set `fenced`."""
        if self.meta.writer == self._writer:
            self._term = self.meta.term  # above `_term` if a claim that was reported as failed is in force
            return True
        if self.fenced is None:
            self.fenced = Fenced(
                f"{self._topics.data}: another writer has claimed term {self.meta.term}, so the writes of this one, "
                f"which claimed term {self._term}, are no longer valid: open the region again to take it back"
            )
            self._count("wal_fenced")
        return False

    def _resolve_in_flight(self, scan: OutcomeScan, unknown: Mapping[InFlightRecord, OutcomeUnknown]) -> None:
        """Resolve the valid records, retry the writes of absent ones in their order, and fail the rest."""
        to_retry: list[PendingWrite] = []
        for flight in self._take_in_flight():
            offset, outcome = scan.offset_of(flight), flight.outcome
            assert outcome is not None
            if offset is not None:
                flight.resolve(offset)
            elif flight in unknown:
                flight.fail(unknown[flight])
            elif self.fenced is not None:
                flight.fail(Fenced(str(self.fenced)))
            elif isinstance(flight.record, Write) and isinstance(outcome, Acknowledged | Unavailable | OutcomeUnknown):
                to_retry += flight.calls
            elif isinstance(outcome, Acknowledged):
                flight.fail(self._unverified(outcome, "the log no longer holds it"))
            else:
                flight.fail(outcome)
        for call in reversed(to_retry):
            call.attempts += 1
            if call.attempts < self._settings.attempts_max:
                self._pending.appendleft(call)
                self._pending_bytes += call.size_bytes
            else:
                message = f"{self._topics.data}: the log did not accept the write in {call.attempts} attempts"
                resolve_future(call.future, Unavailable(message))
        if self.fenced is not None:
            self._refuse_pending(self.fenced)

    def _take_in_flight(self) -> deque[InFlightRecord]:
        in_flight, self._in_flight, self._next_seqs = self._in_flight, deque(), {}
        return in_flight

    def _fail_in_flight(self, error: TidebookError) -> None:
        """Fail all in-flight and pending writes after the log could not be read; the next write starts a new repair."""
        self._must_claim = True
        for flight in self._take_in_flight():
            outcome = flight.outcome
            assert outcome is not None
            if isinstance(outcome, Acknowledged):
                outcome = error if isinstance(error, Fenced) else self._unverified(outcome, f"not verified: {error}")
            flight.fail(outcome)
        self._refuse_pending(self.fenced or Unavailable(f"{self._topics.data}: {error}"))

    def _unverified(self, sent: Acknowledged, why: str) -> OutcomeUnknown:
        message = f"{self._topics.data}: acknowledged at offset {sent.offset}, but {why}"
        return OutcomeUnknown(message, partition=0, offset=sent.offset)

    def _refuse_pending(self, error: TidebookError) -> None:
        pending, self._pending, self._pending_bytes = self._pending, deque(), 0
        for call in pending:
            resolve_future(call.future, error)

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
