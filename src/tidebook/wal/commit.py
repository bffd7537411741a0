"""The owner's way into the data topic: many tables' writes share records, and records share round trips.

A record counts when it is acknowledged and nothing foreign lies before it. Everything else (a gap between two
acknowledgements, a failure, an unknown outcome) stops the sending, and `mend` reads what the log really holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf

from tidebook.core.errors import Fenced, NotFound, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.metrics import Metrics
from tidebook.log.port import Sent
from tidebook.wal.entry import Written
from tidebook.wal.flight import Bundle, Call, Flight, Found
from tidebook.wal.lookup import lives_of, look_up
from tidebook.wal.meta import RegionMeta, Verdict, fold
from tidebook.wal.record import (
    Claim,
    Drop,
    Mark,
    Payloads,
    Write,
    encode_control,
    encode_write,
    record_bytes_max,
)
from tidebook.wal.settings import WalSettings
from tidebook.wal.takeover import claim, follow
from tidebook.wal.topics import RegionTopics


class Commits:
    """Sends the owner's records and keeps the meta that follows from them."""

    def __init__(
        self,
        topics: RegionTopics,
        meta: RegionMeta,
        *,
        settings: WalSettings,
        metrics: Metrics,
        labels: dict[str, object],
    ) -> None:
        self.meta = meta
        self.fenced: Fenced | None = None
        self._closing: Fenced | None = None
        self._topics = topics
        self._term, self._writer = meta.term, meta.writer
        self._settings = settings
        self._metrics = metrics
        self._labels = labels
        self._pack_bytes = min(settings.pack_bytes, settings.limit_bytes - record_bytes_max(0))
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Call | Bundle | Flight] = deque()
        self._pending_bytes = 0
        #: How many writes, marks and drops were taken so far.
        self._turn = 0
        self._pending_bytes_max = settings.pending_bytes_max
        self._flights: deque[Flight] = deque()
        #: Numbers that were given out but are not in the meta yet.
        self._next: dict[int, int] = {}
        self._scheduled = False
        #: Where the log must be read before anything more is sent.
        self._stale = False
        #: Set when somebody was told that nobody knows: what is still on its way then must not become valid.
        self._must_claim = False
        self._mending: asyncio.Task[TidebookError | None] | None = None
        self._changed = asyncio.Event()

    # Taking writes

    def write(self, payloads: Payloads) -> asyncio.Future[Written]:
        """Take a write to one table. See `has_room` first."""
        answer: asyncio.Future[Written] = asyncio.Future(loop=self._loop)
        self._take(Call(payloads, answer))
        return answer

    def write_many(self, payloads: Sequence[Payloads]) -> asyncio.Future[list[Written]]:
        """Take a write to several tables. See `has_room` first."""
        answer: asyncio.Future[list[Written]] = asyncio.Future(loop=self._loop)
        self._take(Bundle(payloads, answer))
        return answer

    def _take(self, call: Call | Bundle) -> None:
        refused = self.fenced or self._closing
        if refused is not None:
            call.answer.set_exception(Fenced(str(refused)))
            return
        call.turn = self._turn = self._turn + 1
        self._pending.append(call)
        self._pending_bytes += call.size_bytes
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    @property
    def has_room(self) -> bool:
        """Whether the next write may be taken at once."""
        return self._pending_bytes <= self._pending_bytes_max or (self.fenced or self._closing) is not None

    async def room(self) -> None:
        """Wait until there is room."""
        while not self.has_room:
            await self._change()

    async def control(self, record: Mark | Drop) -> int:
        """Put a mark or a drop into the data topic, behind the writes that were taken before it."""
        refused = self.fenced or self._closing
        if refused is not None:
            raise Fenced(str(refused))
        answer: asyncio.Future[int] = self._loop.create_future()
        self._turn += 1
        self._pending.append(Flight(record, 0, [], answer, turn=self._turn))
        self._flush()
        return await answer

    async def settled(self) -> None:
        """Wait until everything that was taken so far is answered, whatever comes meanwhile."""
        turn = self._turn
        while self._oldest() <= turn:
            await self._change()

    def _oldest(self) -> float:
        """The turn of the oldest that waits: those on their way went before those that wait to be sent."""
        if self._flights:
            return self._flights[0].turn
        return self._pending[0].turn if self._pending else inf

    async def present(self) -> None:
        """Fold what the data topic holds now, others' records too; writes go on meanwhile."""
        end = await self._topics.end()
        if end < self.meta.next_offset and not self._flights:
            await self.catch_up()  # it ends before what was folded: another life of the topic, as the look will tell
        while self.meta.next_offset < end:
            if self._flights or self._mending is not None:
                await self._change()  # an answer moves the meta on, or shows that something foreign lies between
            else:
                await self.catch_up()
                return

    async def catch_up(self) -> None:
        """Fold what others put into the data topic too, up to its end."""
        self._stale = True
        await self._mend_now(to_end=True)

    async def close(self) -> None:
        """Refuse what comes, answer what was taken, and let go."""
        self._closing = Fenced(f"{self._topics.data}: this region object is closed: open the region again")
        self._changed.set()  # who waits for room is told
        while self._pending or self._flights or self._mending:
            await self._change()
        if self.fenced is None:
            self.fenced = self._closing

    # Sending

    def _flush(self) -> None:
        self._scheduled = False
        if self._stale or self._mending is not None:
            if self._mending is None and self._pending:
                self._start_mending()
            return
        while self._pending and len(self._flights) < self._settings.in_flight_max:
            head = self._pending[0]
            if isinstance(head, Flight):
                self._pending.popleft()
                self._send_control(head)
            else:
                self._send_calls()

    def _send_control(self, flight: Flight) -> None:
        assert not isinstance(flight.record, Write)
        if isinstance(flight.record, Drop):
            self._next[flight.record.table] = 1
        value = encode_control(flight.record)
        flight.size_bytes = len(value)
        self._send(flight, value)

    def _send_calls(self) -> None:
        pending = self._pending
        calls: list[Call | Bundle] = []
        size_bytes = 0
        while pending:
            call = pending[0]
            if isinstance(call, Flight) or (calls and size_bytes + call.size_bytes > self._pack_bytes):
                break
            pending.popleft()
            self._pending_bytes -= call.size_bytes
            if not call.answer.done():  # else nobody waits for it any more, and it was never sent
                size_bytes += call.size_bytes
                calls.append(call)
        if calls:
            write, value = encode_write(self._term, self._writer, self._numbered(calls))
            self._send(Flight(write, len(value), calls, None, turn=calls[0].turn), value)
        self._changed.set()

    def _numbered(self, calls: Sequence[Call | Bundle]) -> list[tuple[int, Payloads]]:
        """The record's parts, in the order of the calls."""
        parts: list[tuple[int, Payloads]] = []
        for call in calls:
            if isinstance(call, Bundle):
                call.firsts = [self._number(each) for each in call.payloads]
                parts += zip(call.firsts, call.payloads, strict=True)
            else:
                call.first = self._number(call.payloads)
                parts.append((call.first, call.payloads))
        return parts

    def _number(self, payloads: Payloads) -> int:
        first = self._next_of(payloads.table)
        self._next[payloads.table] = first + len(payloads.values)
        return first

    def _next_of(self, table: int) -> int:
        following = self._next.get(table)
        if following is None:
            held = self.meta.tables.get(table)
            following = 1 if held is None else held.next_seq_num
        return following

    def _send(self, flight: Flight, value: bytes) -> None:
        self._flights.append(flight)

        def answered(outcome: Sent | TidebookError) -> None:
            self._answered(flight, outcome)

        self._topics.log.send(self._topics.outgoing(value), answered)

    def _answered(self, flight: Flight, outcome: Sent | TidebookError) -> None:
        flight.outcome = outcome
        if (
            self._mending is None
            and not self._stale
            and isinstance(outcome, Sent)
            and outcome.offset == self.meta.next_offset
            and self._flights[0] is flight
        ):
            verdict = fold(self.meta, outcome.offset, flight.size_bytes, flight.record)
            if verdict is Verdict.VALID or not flight.calls:
                self._flights.popleft()
                flight.settle(outcome.offset)
                self._metrics.count("wal_records", 1, **self._labels)
                if self._pending:
                    self._flush()
                self._changed.set()
                return
        self._stale = True
        if self._mending is None:
            self._start_mending()
        self._changed.set()

    # Mending

    def _start_mending(self) -> None:
        self._mending = self._loop.create_task(self._mend(to_end=False))

    async def _mend_now(self, *, to_end: bool) -> None:
        while self._mending is not None:
            await asyncio.shield(self._mending)
        self._mending = self._loop.create_task(self._mend(to_end=to_end))
        error = await asyncio.shield(self._mending)
        if error is not None:
            raise error

    async def _mend(self, *, to_end: bool) -> TidebookError | None:
        """Learn from the log what became of every record in flight, then go on."""
        try:
            while any(flight.outcome is None for flight in self._flights):
                await self._change()
            await self._resolve(to_end=to_end)
            self._stale = False
        except TidebookError as error:
            self._give_up(error)
            return error
        finally:
            self._mending = None
            self._changed.set()
            if self._pending and not self._stale and self.fenced is None:
                self._flush()
        return self.fenced

    async def _resolve(self, *, to_end: bool) -> None:
        if self.fenced is not None:
            raise Fenced(str(self.fenced))
        await self._check_life()
        found = Found(self._writer)
        restored_at, lives = self.meta.restored_at, lives_of(self.meta, self._flights)
        acked = [flight.outcome.offset for flight in self._flights if isinstance(flight.outcome, Sent)]
        stop = max(acked, default=-1) + 1
        if to_end:
            stop = max(stop, await self._topics.end())
        await follow(self._topics, self.meta, stop=stop, on_record=found)
        absent = any(found.offset_of(flight) is None for flight in self._flights)
        if self._holds_claim() and (absent or self._must_claim):
            # Only a new claim makes sure that what is absent can never become valid.
            wanted = Claim(self._term + 1, self._writer)
            await claim(self._topics, self.meta, wanted, attempts_max=self._settings.attempts_max, on_record=found)
            self._metrics.count("wal_claims", 1, **self._labels)
            self._holds_claim()
        unknown: Mapping[Flight, OutcomeUnknown] = {}
        if self.meta.restored_at != restored_at:
            found.seen_from = self.meta.restored_at
            unknown = await look_up(self._topics, self.meta, self._flights, found, lives=lives, writer=self._writer)
        self._must_claim = False
        self._settle(found, unknown)

    async def _check_life(self) -> None:
        try:
            await self._topics.check_life()
        except NotFound as error:
            self.fenced = Fenced(str(error))
            raise self.fenced from error

    def _holds_claim(self) -> bool:
        if self.meta.writer == self._writer:
            self._term = self.meta.term  # also where a claim of ours landed that was given up
            return True
        if self.fenced is None:
            self.fenced = Fenced(
                f"{self._topics.data}: another writer has claimed term {self.meta.term}, this one held term "
                f"{self._term}: what it writes no longer counts; open the region again to take it back"
            )
            self._metrics.count("wal_fenced", 1, **self._labels)
        return False

    def _settle(self, found: Found, unknown: Mapping[Flight, OutcomeUnknown]) -> None:
        flights, self._flights = self._flights, deque()
        self._next = {}
        again: list[Call | Bundle] = []
        for flight in flights:
            offset = found.offset_of(flight)
            if offset is not None:
                flight.settle(offset)
            elif flight in unknown:
                flight.fail(unknown[flight])
            elif self.fenced is not None:
                flight.fail(Fenced(str(self.fenced)))
            elif isinstance(flight.outcome, Sent):
                again += flight.calls
                if flight.answer is not None:
                    flight.fail(self._gone(flight.outcome, "the log no longer holds it"))
            elif isinstance(flight.outcome, Unavailable | OutcomeUnknown):
                again += flight.calls
                if flight.answer is not None:
                    flight.fail(flight.outcome)
            else:
                assert isinstance(flight.outcome, TidebookError)
                flight.fail(flight.outcome)
        for call in reversed(again):
            self._try_again(call)
        if self.fenced is not None:
            self._refuse_pending(self.fenced)

    def _try_again(self, call: Call | Bundle) -> None:
        call.attempts += 1
        if call.attempts < self._settings.attempts_max:
            self._pending.appendleft(call)
            self._pending_bytes += call.size_bytes
        elif not call.answer.done():
            call.answer.set_exception(
                Unavailable(f"{self._topics.data}: the log did not take the write in {call.attempts} attempts")
            )

    def _give_up(self, error: TidebookError) -> None:
        """The log cannot be read, so nobody knows: those in flight are told so, the next write looks again."""
        flights, self._flights = self._flights, deque()
        self._next = {}
        self._must_claim = True
        for flight in flights:
            match flight.outcome:
                case Sent() if isinstance(error, Fenced):
                    flight.fail(error)
                case Sent() as sent:
                    flight.fail(self._gone(sent, f"not verified: {error}"))
                case TidebookError() as failure:
                    flight.fail(failure)
                case None:
                    raise AssertionError("every flight has been answered")
        self._refuse_pending(self.fenced or Unavailable(f"{self._topics.data}: {error}"))

    def _gone(self, sent: Sent, why: str) -> OutcomeUnknown:
        told = f"{self._topics.data}: acknowledged at offset {sent.offset}, but {why}"
        return OutcomeUnknown(told, partition=0, offset=sent.offset)

    def _refuse_pending(self, error: TidebookError) -> None:
        pending, self._pending, self._pending_bytes = self._pending, deque(), 0
        for each in pending:
            if isinstance(each, Flight):
                each.fail(error)
            elif not each.answer.done():
                each.answer.set_exception(error)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
