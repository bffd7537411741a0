"""Projections: read models in a SQL database, each batch in one transaction with its offset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Table

from tidebook.core.errors import EventParked, InvalidInput, ProjectionStopped, Unavailable
from tidebook.core.event import event_type_of
from tidebook.core.key import Key, partition_of
from tidebook.core.position import Position
from tidebook.domain.event_source import At, EventSource, SourceRow, decode_position, describe_source, slice_of
from tidebook.domain.event_type import EventTypes, declared_type
from tidebook.domain.projection_rebuild import Rebuild
from tidebook.domain.projection_runner import Build, OnFailure, ProjectionSettings, RunnerProgress, SliceRunner
from tidebook.domain.projection_tables import RACES, BuildState, ParkedEvent, ProjectionTables, create_tables
from tidebook.domain.sql_engine import Handler, ProjectionTx, SqlEngine, check_handler
from tidebook.domain.topic_scan import in_scan
from tidebook.domain.typed_event import TypedEvent, decode_row
from tidebook.log.port import Log
from tidebook.replication.ticks import tick
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.blocking_facade import BlockingFacade, blocking
from tidebook.runtime.clock import Clock, Ids
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import Horizon, Horizons, HorizonStatus, HorizonWait

SLICES: Final = 16
SLICES_MAX: Final = 1024
RETRIES: Final = 5
#: The interval at which a wait reads the slices that another process owns.
POLL_FIRST_S: Final = 0.005
POLL_MAX_S: Final = 0.1
START_TRIES: Final = 5

#: Returns the types of a topic's events, None if they are not declared.
TypesOf = Callable[[str], EventTypes | None]


class ProjectionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a projection in this process."""

    name: str
    running: bool
    #: The slices of this process that make progress, and those that are stopped, with the reason.
    slices: tuple[int, ...]
    stopped: dict[int, str]
    #: How many events and batches were applied, and how many events a batch may have now.
    events: int
    batches: int
    batch_max: int
    #: The current error of the database, if any.
    error: str | None
    #: The replication that the projection waits for; None while there is progress.
    waiting: HorizonStatus | None


class SliceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a slice, as stored in the target database."""

    slice: int
    owner: str | None
    #: The log time through which its events are applied.
    time_ms: int | None
    error: str | None
    failed_event: str | None


class StoredProjection(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a projection in the target database, of all processes."""

    name: str
    build: int
    paused: bool
    rebuilding: bool
    #: The log time through which all slices are applied; None if one has not begun.
    time_ms: int | None
    slices: tuple[SliceProgress, ...]
    parked: tuple[ParkedEvent, ...]


class Projection:
    """A read model that is the fold of its events: each event is applied exactly once, in order per journal.

    Use it as a decorator of its handler, or add one handler for each type with `on`.

    >>> def declare(book, engine, Deposited):
    ...     balances = book.projection("balances", topics=["accounts"], into=engine)
    ...     @balances.on(Deposited)
    ...     async def deposited(tx, event): ...
    ...     return balances
    """

    def __init__(
        self,
        name: str,
        *,
        source: EventSource,
        engine: SqlEngine,
        log: Log,
        store: StoreWriter,
        clock: Clock,
        ids: Ids,
        types_of: TypesOf,
        tables: Iterable[Table] = (),
        slices: int = SLICES,
        retries: int = RETRIES,
        on_failure: OnFailure = "stop",
    ) -> None:
        if on_failure not in ("stop", "park"):
            raise InvalidInput(f'on_failure must be "stop" or "park", not {on_failure!r}')
        if type(slices) is not int or not 1 <= slices <= SLICES_MAX:
            raise InvalidInput(f"slices must be a number from 1 to {SLICES_MAX}, not {slices!r}")
        self.name = name
        self._source = source
        self._followed = describe_source(source)
        self._knows_slices = False
        self._engine = engine
        self._log = log
        self._store = store
        self._clock = clock
        self._ids = ids
        self._types_of = types_of
        self._rows = ProjectionTables(name, engine.dialect)
        self._own_tables = tuple(tables)
        self._settings = ProjectionSettings(slices=slices, retries=retries, on_failure=on_failure)
        self._handler: Handler | None = None
        self._handlers: dict[str, Handler] = {}
        self._horizons = Horizons(store, log)
        self._wait = HorizonWait(store, clock, self._horizons, source.topics, stream=f"projection {name!r}")
        self._progress = RunnerProgress()
        self._news: asyncio.Event = asyncio.Event()
        self._running = False
        self._active: SliceRunner | None = None
        self._make_runner: Callable[..., SliceRunner] = SliceRunner

    # Handlers

    def __call__(self, handler: Handler) -> Projection:
        """Set the handler of all events without a specific handler; return the projection."""
        check_handler(handler)
        self._handler = handler
        return self

    def on(self, *events: type[Any] | str) -> Callable[[Handler], Handler]:
        """Return a decorator for the handler of one or more types: classes, or names of types."""
        names = [each if isinstance(each, str) else declared_type(each).name for each in events]

        def add(handler: Handler) -> Handler:
            check_handler(handler)
            for name in names:
                if name in self._handlers:
                    raise InvalidInput(f"projection {self.name!r} has two handlers for {name!r}")
                self._handlers[name] = handler
            return handler

        return add

    def _prepare(self, row: SourceRow) -> tuple[Handler, TypedEvent[Any]] | None:
        handler = self._handler
        if self._handlers:
            handler = self._handlers.get(event_type_of(row.row.encoded)[0] or "", handler)
        if handler is None:
            return None
        return handler, decode_row(self._types_of(row.topic), row.topic, row.id, row.row, row.partition)

    def _check_handlers(self) -> None:
        if self._handler is None and not self._handlers:
            raise InvalidInput(f"projection {self.name!r} has no handler: decorate a function with it, or use on(...)")

    # Running

    async def run(self) -> None:
        """Apply events until cancelled; a batch in progress is finished first.

        Any number of processes may run the same projection: they share its slices.
        """
        self._check_handlers()
        if self._running:
            raise InvalidInput(f"projection {self.name!r} is already running in this process")
        self._running = True
        try:
            member = self._ids.new().hex()
            while True:
                state = await self.start()
                if state.swapping is not None:
                    await self._rebuild().finish_swap(state)
                    continue
                self._active = self._runner(Build(state.build, {}), member, _accept)
                await self._active.run()
        finally:
            self._running, self._active = False, None
            self._publish()

    async def start(self) -> BuildState:
        """Create the tables and rows that are missing, and return the projection's row.

        Raise InvalidInput if the live build follows another source: its offsets would skip events of this one.
        """
        state, source = await self._register()
        self._check_source(source)
        return state

    def _check_source(self, stored: str | None) -> None:
        if stored is not None and stored != self._followed:
            raise InvalidInput(
                f"projection {self.name!r} was started with {stored} and now has {self._followed}: rebuild it, or give "
                "it another name, under which it starts with the first event"
            )

    async def _register(self) -> tuple[BuildState, str | None]:

        def begin(connection: Connection) -> tuple[BuildState, str | None]:
            self._rows.create(connection)
            create_tables(connection, self._own_tables)
            state = self._rows.register(connection, self._settings.slices, self._followed)
            return state, self._rows.source(connection)

        found, attempt = None, 0
        while found is None:
            try:
                found = await self._engine.run(begin)
            except RACES:  # another process creates the same
                attempt += 1
                if attempt == START_TRIES:
                    raise
                await asyncio.sleep(0.05 * attempt)
        self._take_slices(*found)
        return found

    def _take_slices(self, state: BuildState, source: str | None) -> None:
        """Use the stored number of slices instead of the declared one."""
        self._settings = msgspec.structs.replace(self._settings, slices=state.slices)
        self._knows_slices = source in (None, self._followed)

    def _runner(self, build: Build, member: str, check: Callable[[ProjectionTx], None]) -> SliceRunner:
        progress = self._progress if not build.suffix else RunnerProgress()
        return self._make_runner(
            self._rows, self._engine, self._source, self._wait, self._prepare, self._settings, build, member,
            self._clock, progress, self._publish, check,
        )  # fmt: skip

    def _publish(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # Status

    def status(self) -> ProjectionStatus:
        """Return the state of the projection in this process."""
        progress = self._progress
        return ProjectionStatus(
            name=self.name,
            running=self._running,
            slices=tuple(sorted(progress.reached)),
            stopped=dict(progress.stopped),
            events=progress.events,
            batches=progress.batches,
            batch_max=progress.batch_max,
            error=progress.error,
            waiting=self._wait.waiting,
        )

    @property
    def problem(self) -> str | None:
        """Why the projection cannot apply all events in this process; None if it can."""
        stopped = self._progress.stopped
        if stopped:
            number, reason = next(iter(stopped.items()))
            return f"slice {number} is stopped at {reason}"
        return self._progress.error or (self._wait.waiting.describe() if self._wait.waiting else None)

    async def stored(self) -> StoredProjection:
        """Return the state of all slices from the target database; raise NotFound if it was never started."""

        def read(connection: Connection) -> StoredProjection:
            state = self._rows.required_state(connection)
            slices = tuple(
                SliceProgress(
                    slice=each.slice,
                    owner=each.owner if each.leased else None,
                    time_ms=_time_ms(decode_position(each.position).at),
                    error=each.error,
                    failed_event=each.failed_event,
                )
                for each in self._rows.slices(connection, state.build)
            )
            times = [each.time_ms for each in slices]
            return StoredProjection(
                name=self.name,
                build=state.build,
                paused=state.paused,
                rebuilding=self._rows.is_rebuilding(connection, state),
                time_ms=None if None in times else min(each for each in times if each is not None),
                slices=slices,
                parked=tuple(self._rows.parked(connection, state.build)),
            )

        return await self._engine.run(read)

    async def wait_for(self, done: Any, *, timeout_s: float = 30.0) -> None:
        """Return once the events of a command are applied, so that a caller can read its own write.

        `done` is the result of `Decider.execute`. Raise ProjectionStopped if their slice is stopped, EventParked if one
        of them was skipped, and Unavailable after `timeout_s`.
        """
        topic, id, seq_nr = (getattr(done, name, None) for name in ("topic", "id", "seq_nr"))
        if not isinstance(topic, str) or not isinstance(id, str) or not isinstance(seq_nr, int):
            raise InvalidInput("wait_for needs the result of Decider.execute")
        if self._source.topics is not None and topic not in self._source.topics:
            raise InvalidInput(f"projection {self.name!r} does not follow topic {topic}")
        if seq_nr == 0:
            return
        try:
            async with asyncio.timeout(timeout_s):
                goal = await self._place(Key(topic, id), seq_nr, done.offset)
                await self._reach({slice_of(topic, id, await self._stored_slices()): goal})
                await self._check_parked(topic, id, range(getattr(done, "first", None) or seq_nr, seq_nr + 1), goal)
        except TimeoutError as error:
            why = self._progress.error or (self._wait.waiting.describe() if self._wait.waiting else "it is behind")
            running = why if self._running else "it does not run in this process"
            late = f"has not applied {topic}/{id} up to {seq_nr} within {timeout_s:g} s"
            raise Unavailable(f"projection {self.name!r} {late}: {running}") from error

    async def _place(self, key: Key, seq_nr: int, offset: int | None) -> At:
        """Wait until an event is replicated; return its position in the stream."""
        while (config := await self._store.topic_config(key.topic)) is None:
            await self._store.wait_any(timeout_s=0.1)
        partition = partition_of(key.id, config.partitions)
        beyond = Position(config.epoch, (offset or 0) - 1)
        while True:
            if offset is not None:
                await self._store.wait(key.topic, partition, beyond=beyond, timeout_s=1.0)
            pointer, head = await self._store.pointer(key.topic, partition), await self._store.head(key)
            if pointer is not None and head is not None and head.seq_nr >= seq_nr:
                rows = await self._store.events(key, head, after=seq_nr - 1, to=seq_nr, limit=1)
                return await self._source.place(key, partition, rows[0]) if rows else (pointer.time_ms + 1,)
            if pointer is not None and offset is not None and pointer.position >= Position(config.epoch, offset):
                return (pointer.time_ms + 1,)  # purged since
            await self._store.wait_any(timeout_s=0.1)

    async def _check_parked(self, topic: str, id: str, numbers: range, goal: At) -> None:
        """Raise EventParked if one of the events of the append at this position was skipped."""
        events = [f"{topic}/{id}/{number}" for number in numbers]

        def read(connection: Connection) -> list[tuple[str, str, str]]:
            return self._rows.parked_at(connection, self._rows.required_state(connection).build, events)

        for event, position, reason in await self._engine.run(read):
            # Time and offset separate the append from those of earlier incarnations of the journal.
            at = decode_position(position).at
            if in_scan(at) or (at[:1] == goal[:1] and at[3:4] == goal[3:4]):
                raise EventParked(name=self.name, event=event, reason=reason)

    async def _reach(self, goals: Mapping[int, At]) -> None:
        """Wait until slices have reached their goals, in this process or in another."""
        backoff = Backoff(first_s=POLL_FIRST_S, max_s=POLL_MAX_S)
        while True:
            progress, news = self._progress, self._news
            left = {number: at for number, at in goals.items() if progress.reached.get(number, ()) < at}
            if not left:
                return
            for number in left:
                if (reason := progress.stopped.get(number)) is not None:
                    raise ProjectionStopped(name=self.name, slice=number, reason=reason)
            if progress.reached.keys() >= left.keys():
                await news.wait()
                continue
            if await self._stored_slices_reached(left):
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await news.wait()

    async def _stored_slices_reached(self, goals: Mapping[int, At]) -> bool:
        def read(connection: Connection) -> bool:
            if (state := self._rows.state(connection) if self._rows.exists(connection) else None) is None:
                return False
            slices = {each.slice: each for each in self._rows.slices(connection, state.build)}
            for number, goal in goals.items():
                if (found := slices.get(number)) is None:
                    return False
                if found.error is not None:
                    reason = f"{found.failed_event}: {found.error}"
                    raise ProjectionStopped(name=self.name, slice=number, reason=reason)
                if decode_position(found.position).at < goal:
                    return False
            return True

        return await self._engine.run(read)

    async def settle(self) -> None:
        """Return once everything below the current horizon is applied, in all slices, of this process and others."""
        horizon = await self._horizons.read(self._source.topics)
        if horizon.time_ms >= 0:
            await self._reach(dict.fromkeys(range(await self._stored_slices()), (horizon.time_ms,)))

    async def _stored_slices(self) -> int:
        """Wait until the projection was started by some process; return its number of slices.

        Raise InvalidInput if it was started with another source: its positions have no meaning for this one.
        """

        def read(connection: Connection) -> tuple[BuildState, str | None] | None:
            state = self._rows.state(connection) if self._rows.exists(connection) else None
            return None if state is None else (state, self._rows.source(connection))

        while not self._knows_slices:
            if (found := await self._engine.run(read)) is not None:
                self._check_source(found[1])
                self._take_slices(*found)
            else:
                await asyncio.sleep(POLL_MAX_S)
        return self._settings.slices

    # Commands

    async def pause(self) -> None:
        """Pause the projection in all processes, within seconds."""
        await self._engine.run(lambda connection: self._rows.set_paused(connection, True))
        self._renew_soon()

    async def resume(self) -> list[str]:
        """Continue a paused projection and retry its stopped slices; return the events that had stopped them."""
        return await self._continue(skip=False)

    async def skip(self) -> list[str]:
        """Park the events that stopped slices, and continue after them; also resume a pause. Return these events."""
        return await self._continue(skip=True)

    async def _continue(self, *, skip: bool) -> list[str]:
        def change(connection: Connection) -> list[str]:
            build = self._rows.required_state(connection).build
            self._rows.set_paused(connection, False)
            return self._rows.resume(connection, build, skip=skip)

        continued = await self._engine.run(change)
        self._progress.stopped = {}
        self._renew_soon()
        return continued

    def _renew_soon(self) -> None:
        """Make the runner of this process notice a command now; those of other processes notice it within seconds."""
        if self._active is not None:
            self._active.renew_soon()

    # Rebuild

    async def rebuild(self) -> int:
        """Rebuild the read model next to the live one, then swap the tables; return the number of the new build.

        The live one continues during the rebuild. The handler must write to `tx.table(...)`, and the projection must be
        declared with its `tables`. At the swap the live build waits until the new one has reached it. The new build has
        everything that was replicated when the rebuild began, so it waits for the horizon; if nothing replicates, a
        warning says what is missing.
        """
        self._check_handlers()
        if not self._own_tables:
            raise InvalidInput(f"projection {self.name!r}: a rebuild needs book.projection(..., tables=[...])")
        state, source = await self._register()
        number = await self._rebuild().run(state, is_same=source == self._followed)
        self._renew_soon()
        return number

    def _rebuild(self) -> Rebuild:
        return Rebuild(
            self._rows, self._engine, self._own_tables, self._followed, self._ids, self._runner, self._send_ticks,
            self._settings.lease_s,
        )  # fmt: skip

    async def _send_ticks(self) -> Horizon:
        horizon = await self._horizons.read(self._source.topics)
        await tick(self._log, self._store, self._source.topics)
        return horizon


def _time_ms(at: At) -> int | None:
    """Return the time of a position; None before the first event, or if there is no horizon yet."""
    return at[0] if at and at[0] > 0 else None


def _accept(_: ProjectionTx) -> None:
    pass


class SyncProjection(BlockingFacade[Projection]):
    """The blocking form of `Projection`."""

    def __call__(self, handler: Handler) -> SyncProjection:
        """Set the handler of all events without a specific handler; return the projection."""
        self._target(handler)
        return self

    def on(self, *events: type[Any] | str) -> Callable[[Handler], Handler]:
        """Return a decorator for the handler of one or more types: classes, or names of types."""
        return self._target.on(*events)

    def status(self) -> ProjectionStatus:
        """Return the state of the projection in this process."""
        return self._target.status()

    run = blocking(Projection.run)
    stored = blocking(Projection.stored)
    wait_for = blocking(Projection.wait_for)
    settle = blocking(Projection.settle)
    pause = blocking(Projection.pause)
    resume = blocking(Projection.resume)
    skip = blocking(Projection.skip)
    rebuild = blocking(Projection.rebuild)
