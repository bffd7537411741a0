"""The loop that runs a projection in one process: it reads the slices it owns and applies their events in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec
from sqlalchemy import Connection, Table
from sqlalchemy.exc import DBAPIError

from tidebook.core.errors import Fenced, ProjectionStopped, UnknownVersion, UnreadableEvent
from tidebook.domain.event_source import (
    POLL_S,
    At,
    EventSource,
    SourcePage,
    SourcePosition,
    SourceRow,
    decode_position,
    encode_position,
    slice_of,
)
from tidebook.domain.projection_tables import ProjectionTables, SliceState
from tidebook.domain.sql_engine import (
    Handler,
    HandlerFailed,
    LiveTableWritten,
    ProjectionTx,
    RolledBack,
    SqlEngine,
    is_transient,
)
from tidebook.domain.topic_scan import can_join
from tidebook.domain.typed_event import TypedEvent
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.clock import Clock
from tidebook.tags.horizon import HorizonWait

LOGGER = logging.getLogger("tidebook.domain")

T = TypeVar("T")

LEASE_S: Final = 10.0
#: The interval at which a member renews its lease, takes and releases slices, and notices commands.
REBALANCE_S: Final = 2.0
#: The interval at which the position of slices without events is stored.
IDLE_S: Final = 1.0
PAGES_AHEAD: Final = 2
BATCH_FIRST: Final = 200
BATCH_MIN: Final = 20
BATCH_MAX: Final = 5_000
#: A batch grows while it takes less than SHORT_S, and shrinks when it takes longer than LONG_S.
SHORT_S: Final = 0.1
LONG_S: Final = 0.5
RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
OUTAGE_MAX_S: Final = 10.0

OnFailure = Literal["stop", "park"]


class ProjectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a projection runs."""

    slices: int
    retries: int
    on_failure: OnFailure
    lease_s: float = LEASE_S


class Build(msgspec.Struct, frozen=True):
    """The target of a runner: the live tables, or their copies during a rebuild."""

    number: int
    tables: Mapping[str, Table]
    suffix: str = ""
    #: The events that the live build has skipped: a rebuild skips those that fail again.
    skipped: frozenset[str] = frozenset()

    def make_tx(self, connection: Any) -> ProjectionTx:
        """Return the transaction that handlers receive."""
        return ProjectionTx(connection, self.tables, self.suffix)


#: Returns the handler and the event of a row, or None if no handler takes it.
Prepare = Callable[[SourceRow], tuple[Handler, TypedEvent[Any]] | None]


class RunnerProgress(msgspec.Struct):
    """The progress of a runner, for `status` and `wait_for`."""

    events: int = 0
    batches: int = 0
    batch_max: int = BATCH_FIRST
    error: str | None = None
    #: The position that each slice has reached, for the slices that this process owns.
    reached: dict[int, At] = {}
    stopped: dict[int, str] = {}


class SliceRunner:
    """Runs one build of a projection in this process, until it is cancelled or the build is no longer the live one."""

    _short_s: ClassVar[float] = SHORT_S
    _long_s: ClassVar[float] = LONG_S

    def __init__(
        self,
        tables: ProjectionTables,
        engine: SqlEngine,
        source: EventSource,
        wait: HorizonWait,
        prepare: Prepare,
        settings: ProjectionSettings,
        build: Build,
        member: str,
        clock: Clock,
        progress: RunnerProgress,
        on_progress: Callable[[], None],
        check: Callable[[ProjectionTx], None],
    ) -> None:
        self._tables = tables
        self._engine = engine
        self._source = source
        self._wait = wait
        self._prepare = prepare
        self._settings = settings
        self._build = build
        self._member = member
        self._clock = clock
        self.progress = progress
        self._on_progress = on_progress
        self._check = check
        self._slices: dict[int, str] = {}
        self._rebalance_at_ms = self._idle_at_ms = clock.monotonic_ms()
        self._paused = False

    # The loop

    async def run(self) -> None:
        """Run until another build is live."""
        try:
            while await self._renew():
                await self._wait.ask_for_ticks()
                delivered = False if self._paused else await self._round()
                if not self._is_renewal_due():
                    await self._wait.wait(POLL_S, delivered=delivered)
        finally:
            await self._leave()

    async def run_to(self, goals: Mapping[int, At]) -> None:
        """Run until each slice has reached its goal. A rebuild uses this to catch up with the live build."""
        while await self._renew():
            if all(self.progress.reached.get(number, ()) >= at for number, at in goals.items()):
                return
            if self.progress.stopped:
                number, error = next(iter(self.progress.stopped.items()))
                raise ProjectionStopped(name=self._tables.name, slice=number, reason=error, rebuild=True)
            delivered = await self._round()
            if not self._is_renewal_due():
                await self._wait.wait(POLL_S, delivered=delivered)
        raise Fenced(f"projection {self._tables.name!r}: another rebuild has replaced this one: wait for it")

    def renew_soon(self) -> None:
        """Renew the lease, and read the slices and commands, at the next opportunity."""
        self._rebalance_at_ms = self._clock.monotonic_ms()

    @property
    def _renew_every_s(self) -> float:
        return min(REBALANCE_S, self._settings.lease_s / 5)

    def _is_renewal_due(self) -> bool:
        return self._clock.monotonic_ms() >= self._rebalance_at_ms

    async def _renew(self) -> bool:
        """Renew the lease and take slices, if due; return False if the build has been removed."""
        if not self._is_renewal_due():
            return True

        def renew(connection: Connection) -> list[SliceState] | None:
            # The lease first: it is a write, so that SQLite does not upgrade a read transaction.
            owned = self._tables.rebalance(connection, self._build.number, self._member, self._settings.lease_s)
            state = self._tables.state(connection)
            if state is None or state.swapping is not None:
                return None
            if not self._build.suffix and state.build != self._build.number:
                return None
            if self._build.suffix and not self._tables.slices(connection, self._build.number):
                return None  # a later rebuild has removed this one, whose process had stopped for longer than a lease
            self._paused = state.paused and not self._build.suffix
            return owned

        owned = await self._database(renew)
        self._rebalance_at_ms = self._clock.monotonic_ms() + int(self._renew_every_s * 1000)
        if owned is None:
            return False
        self._slices = {each.slice: each.position for each in owned if each.error is None}
        self.progress.stopped = {
            each.slice: f"{each.failed_event}: {each.error}" for each in owned if each.error is not None
        }
        reached = {number: decode_position(encoded).at for number, encoded in self._slices.items()}
        known = self.progress.reached
        self.progress.reached = {number: max(at, known.get(number, ())) for number, at in reached.items()}
        self._on_progress()
        return True

    async def _leave(self) -> None:
        self.progress.reached = {}
        leaving = asyncio.ensure_future(
            self._engine.run(lambda connection: self._tables.leave(connection, self._build.number, self._member))
        )
        with suppress(Exception):  # if this fails, the lease expires
            await _uncancelled(leaving)

    async def _database(self, work: Callable[[Connection], T]) -> T:
        """Run a function in a transaction; retry for as long as the database is down."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=OUTAGE_MAX_S)
        while True:
            try:
                result = await self._engine.run(work)
            except Exception as error:
                if not is_transient(error):
                    raise
                await self._outage(error, backoff)
                continue
            self.progress.error = None
            return result

    async def _outage(self, error: Exception, backoff: Backoff) -> None:
        self.progress.error = _reason(error)[:500]
        pause_s = backoff.next_s()
        LOGGER.warning(
            "projection %r: a server failed, retrying in %.2f s: %s", self._tables.name, pause_s, self.progress.error
        )
        await asyncio.sleep(pause_s)

    async def _round(self) -> bool:
        """Process the events below the horizon for the slices that are furthest behind; return whether any were found.

        Slices at the same position form a group, which reads the stream once. A group that reaches the position of
        another one stops there, and the next round reads for both.
        """
        groups: dict[str, list[int]] = {}
        for number, encoded in self._slices.items():
            groups.setdefault(encoded, []).append(number)
        if not groups:
            return False
        earliest, *others = sorted(groups, key=lambda encoded: decode_position(encoded).at)
        begin = decode_position(earliest).at
        stop = next((each for each in map(decode_position, others) if can_join(begin, each.at)), None)
        try:
            return await self._advance_group(sorted(groups[earliest]), earliest, stop) or stop is not None
        except Fenced:
            self.renew_soon()
            return True

    async def _advance_group(self, slices: list[int], before: str, stop: SourcePosition | None) -> bool:
        delivered = False
        async with aclosing(_read_ahead(self._source.pages(decode_position(before)))) as pages:
            async for page in pages:
                rows, end = page.rows, page.position
                if stop is not None and end.at >= stop.at and can_join(end.at, stop.at) and not page.jumps:
                    rows, end = [row for row in rows if row.at <= stop.at], stop
                is_last_page = end is stop or page.jumps
                before, applied = await self._apply_page(slices, before, rows, end, always_advance=is_last_page)
                delivered = delivered or applied
                if is_last_page or any(number not in self._slices for number in slices) or self._is_renewal_due():
                    return True
        return delivered

    async def _apply_page(
        self, slices: list[int], before: str, rows: Sequence[SourceRow], end: SourcePosition, *, always_advance: bool
    ) -> tuple[str, bool]:
        """Apply the rows of a page in batches; return the stored position, and whether rows were applied.

        With `always_advance` the position is stored even if no row is applied.
        """
        count, mine, applied = self._settings.slices, frozenset(slices), False
        begin = 0
        while True:
            chunk = rows[begin : begin + self.progress.batch_max]
            begin += len(chunk)
            is_last = begin >= len(rows)
            # Within a page the log offsets remain those before the page: a restart reads some events again, and skips
            # them because they are at or before `at`.
            position = end if is_last else SourcePosition(chunk[-1].at, decode_position(before).log)
            after = encode_position(position)
            selected = [row for row in chunk if slice_of(row.topic, row.id, count) in mine]
            if selected or always_advance or self._idle_at_ms <= self._clock.monotonic_ms():
                if after != before:
                    await self._apply(slices, before, after, selected)
                    before = after
                self._idle_at_ms = self._clock.monotonic_ms() + int(IDLE_S * 1000)
            applied = applied or bool(selected)
            for number in slices:
                if number in self._slices:
                    self.progress.reached[number] = max(position.at, self.progress.reached.get(number, ()))
            self._on_progress()
            if is_last or any(number not in self._slices for number in slices):
                return before, applied

    # Batches

    async def _apply(self, slices: list[int], before: str, after: str, rows: Sequence[SourceRow]) -> None:
        """Apply rows and advance the slices in one transaction; if it fails, apply each slice event by event."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=OUTAGE_MAX_S)
        while True:
            try:
                calls = [call for row in rows if (call := self._prepare(row)) is not None]
                began_ms = self._clock.monotonic_ms()
                await self._commit(slices, before, after, calls)
                self._adapt_batch_size(len(calls), (self._clock.monotonic_ms() - began_ms) / 1000)
            except Fenced:
                raise
            except Exception as error:
                if is_transient(error):
                    await self._outage(error, backoff)
                    continue
                LOGGER.warning("projection %r: a batch failed: %s", self._tables.name, _reason(error))
                await self._apply_singly(slices, before, after, rows)
                return
            self.progress.error = None
            self.progress.events += len(calls)
            self._slices.update(dict.fromkeys(slices, after))
            return

    async def _commit(
        self, slices: Sequence[int], before: str, after: str, calls: Sequence[tuple[Handler, Any]]
    ) -> None:
        def fence(connection: Connection) -> None:
            self._tables.advance(connection, self._build.number, self._member, slices, before, after)

        def verify(connection: Connection) -> None:
            # PostgreSQL turns the COMMIT of a transaction with a failed statement into a ROLLBACK, without an error.
            try:
                kept = self._tables.is_at(connection, self._build.number, self._member, slices, after)
            except DBAPIError as error:
                if is_transient(error):
                    raise
                raise RolledBack() from error
            if not kept:
                raise RolledBack()

        applying = asyncio.ensure_future(self._engine.apply(fence, calls, self._build.make_tx, self._check, verify))
        await _uncancelled(applying)  # a transaction in a thread cannot be stopped, and its outcome must be known
        self.progress.batches += 1

    def _adapt_batch_size(self, count: int, took_s: float) -> None:
        size = self.progress.batch_max
        if took_s > self._long_s:
            self.progress.batch_max = max(BATCH_MIN, size // 2)
        elif took_s < self._short_s and count * 2 > size:
            self.progress.batch_max = min(BATCH_MAX, size * 2)

    async def _apply_singly(self, slices: list[int], before: str, after: str, rows: Sequence[SourceRow]) -> None:
        """Apply each slice on its own, one event per transaction, to find the event that fails and stop only there."""
        log, count = decode_position(before).log, self._settings.slices
        for number in slices:
            reached = before
            for row in rows:
                if slice_of(row.topic, row.id, count) != number:
                    continue
                position = encode_position(SourcePosition(row.at, log))
                if not await self._apply_one(number, reached, position, row):
                    break
                reached = position
            else:
                if reached != after:
                    await self._database(
                        lambda connection, number=number, reached=reached: self._tables.advance(  # type: ignore[misc]
                            connection, self._build.number, self._member, [number], reached, after
                        )
                    )
                self._slices[number] = after
                continue
            self._slices.pop(number, None)

    async def _apply_one(self, number: int, before: str, after: str, row: SourceRow) -> bool:
        """Apply one event, with retries; return False if its slice is stopped."""
        backoff, outage = (Backoff(first_s=RETRY_FIRST_S, max_s=limit) for limit in (RETRY_MAX_S, OUTAGE_MAX_S))
        failures = 0
        while True:
            try:
                call = self._prepare(row)
                await self._commit([number], before, after, [] if call is None else [call])
                self.progress.events += 1
                return True
            except Fenced:
                raise
            except Exception as error:
                if isinstance(cause := _cause(error), UnknownVersion):
                    raise cause from error  # only a later version of Tidebook can apply the event: this process stops
                if is_transient(error):
                    await self._outage(error, outage)
                    continue
                failures += 1
                if failures > self._settings.retries or isinstance(error, UnreadableEvent):
                    return await self._give_up(number, before, after, row, error)
                await asyncio.sleep(backoff.next_s())

    async def _give_up(self, number: int, before: str, after: str, row: SourceRow, error: Exception) -> bool:
        event, reason = f"{row.topic}/{row.id}/{row.row.seq_nr}", _reason(error)
        LOGGER.error("projection %r: event %s failed permanently: %s", self._tables.name, event, reason)
        build, member, tables = self._build.number, self._member, self._tables

        def park(connection: Connection) -> None:
            tables.advance(connection, build, member, [number], before, after)
            tables.park(connection, build, number, event, after, reason)

        def stop(connection: Connection) -> None:
            tables.stop(
                connection, build, member, number, before, error=reason, failed_position=after, failed_event=event
            )

        parks = self._settings.on_failure == "park" or event in self._build.skipped
        if parks and not isinstance(error.__cause__, LiveTableWritten):
            await self._database(park)
            return True
        await self._database(stop)
        self.progress.stopped[number] = f"{event}: {reason}"
        self._on_progress()
        return False


def _cause(error: BaseException) -> BaseException:
    """Return the error that a handler raised, or the error itself."""
    return error.__cause__ if isinstance(error, HandlerFailed) and error.__cause__ is not None else error


def _reason(error: BaseException) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {cause}"[:2_000]


async def _uncancelled(future: asyncio.Future[T]) -> T:
    """Wait for a future even if this task is cancelled meanwhile; raise the cancellation afterwards."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.done():
            await asyncio.wait([future])
        if not future.cancelled():
            future.exception()
        raise


async def _read_ahead(pages: AsyncIterator[SourcePage]) -> AsyncGenerator[SourcePage, None]:
    """Read the next pages while one is being applied."""
    queue: asyncio.Queue[SourcePage | BaseException | None] = asyncio.Queue(PAGES_AHEAD)

    async def read() -> None:
        try:
            async for page in pages:
                await queue.put(page)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    reading = asyncio.create_task(read())
    try:
        while (page := await queue.get()) is not None:
            if isinstance(page, BaseException):
                raise page
            yield page
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
