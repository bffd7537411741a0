"""The rebuild of a projection: a new build next to the live one, which it then replaces by a swap of tables."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Connection, MetaData, Table, inspect, text
from sqlalchemy.sql.compiler import IdentifierPreparer

from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.domain.event_source import BEGINNING, At, decode_position
from tidebook.domain.projection_runner import Build, SliceRunner
from tidebook.domain.projection_tables import SWAP_OWNER, BuildState, ProjectionTables, SliceState, create_tables
from tidebook.domain.sql_engine import LiveTableWritten, ProjectionTx, SqlEngine
from tidebook.domain.topic_scan import PLACE_SIZE, in_scan
from tidebook.runtime.clock import Ids
from tidebook.tags.horizon import Horizon

#: For how long a swap may stop the live build.
SWAP_S: Final = 60.0

#: Makes the runner of a build for a member; the last argument checks the transaction after each call of a handler.
MakeRunner = Callable[[Build, str, Callable[[ProjectionTx], None]], SliceRunner]


class Rebuild:
    """Rebuilds one projection; see `Projection.rebuild`."""

    def __init__(
        self,
        rows: ProjectionTables,
        engine: SqlEngine,
        tables: Sequence[Table],
        followed: str,
        ids: Ids,
        make_runner: MakeRunner,
        send_ticks: Callable[[], Awaitable[Horizon]],
        lease_s: float,
    ) -> None:
        self._rows = rows
        self._engine = engine
        self._own_tables = tables
        self._followed = followed
        self._ids = ids
        self._make_runner = make_runner
        #: Returns the horizon of the source, and sends the ticks that move it past everything that is replicated.
        self._send_ticks = send_ticks
        self._lease_s = lease_s

    async def run(self, state: BuildState, *, is_same: bool) -> int:
        """Build and swap; return the number of the new build. `is_same`: the live build follows the same source."""
        if state.swapping is not None:
            await self.finish_swap(state)
        member, swap = self._ids.new().hex(), f"{SWAP_OWNER}{self._ids.new().hex()}"
        state = await self._engine.run(lambda connection: self._rows.begin_build(connection, member, self._lease_s))
        await self._remove_abandoned(state)
        parked = await self._engine.run(lambda connection: self._rows.parked(connection, state.build))
        build = self._copy_of(state.last_build, frozenset(each.event for each in parked))
        runner = self._make_runner(build, member, _refuse_live_table)
        try:
            await self._engine.run(lambda connection: create_tables(connection, build.tables.values()))
            live = await self._engine.run(lambda connection: self._rows.slices(connection, state.build))
            # The live build may never have run.
            end = await self._replicated_end(runner, state.slices)
            goals = _goals(live, is_same=is_same)
            await runner.run_to({number: max(at, end) for number, at in goals.items()})
            # Little is left to apply: stop the live build, and catch up with it.
            frozen = await self._engine.run(lambda c: self._rows.freeze(c, state.build, swap, SWAP_S))
            await runner.run_to(_goals(frozen, is_same=is_same))
            await self._swap(state.build, build, swap)
        except BaseException:
            await self._drop(build, state.build, swap)
            raise
        return build.number

    async def _replicated_end(self, runner: SliceRunner, slices: int) -> At:
        """Return the position after everything that is replicated now; first wait until there is a horizon."""
        horizon = await self._send_ticks()
        if horizon.topic is None:
            return BEGINNING  # none of the topics exists
        if horizon.time_ms < 0:
            await runner.run_to(dict.fromkeys(range(slices), (0,)))
            horizon = await self._send_ticks()
        return (horizon.most_ms + 1,)

    async def _remove_abandoned(self, state: BuildState) -> None:
        """Remove the builds of rebuilds whose processes were killed: the tables first, since the rows name them."""

        def remove(connection: Connection) -> None:
            for number in self._rows.abandoned_builds(connection, state):
                for table in self._copy_of(number).tables.values():
                    table.drop(connection, checkfirst=True)
                self._rows.remove_build(connection, number)

        await self._engine.run(remove)

    def _copy_of(self, number: int, skipped: frozenset[str] = frozenset()) -> Build:
        suffix = f"__{number}"
        return Build(number, {table.key: copied(table, suffix) for table in self._own_tables}, suffix, skipped)

    async def _swap(self, live: int, build: Build, swap: str) -> None:
        if has_transactional_ddl(self._engine.dialect):

            def swap_all(connection: Connection) -> None:
                self._rows.check_frozen(connection, live, swap, build.number)
                swap_tables(connection, self._own_tables, build.tables, build.suffix)
                self._rows.make_live(connection, build.number, self._followed)

            await self._engine.run(swap_all)
            return

        def announce(connection: Connection) -> None:
            self._rows.check_frozen(connection, live, swap, build.number)
            self._rows.set_swapping(connection, build.number, self._followed)

        await self._engine.run(announce)
        await self.finish_swap(await self._engine.run(self._rows.required_state))

    async def finish_swap(self, state: BuildState) -> None:
        """Rename the tables of an announced swap if that was not done, and make the build live."""
        if state.swapping is None:
            return
        build = self._copy_of(state.swapping)

        def finish(connection: Connection) -> None:
            if self._rows.required_state(connection, lock=True).swapping is None:
                return  # another process has finished it
            swap_tables(connection, self._own_tables, build.tables, build.suffix)
            self._rows.make_live(connection, build.number)

        await self._engine.run(finish)

    async def _drop(self, build: Build, live: int, swap: str) -> None:
        """Undo a rebuild that failed: release the live slices, and drop the copies, unless the swap has begun."""

        def undo(connection: Connection) -> None:
            state = self._rows.required_state(connection)
            if state.swapping == build.number or state.build == build.number:
                return
            self._rows.leave(connection, live, swap)
            self._rows.remove_build(connection, build.number)
            for table in build.tables.values():
                table.drop(connection, checkfirst=True)

        with suppress(Exception):  # the original error matters more
            await asyncio.shield(self._engine.run(undo))


def _goals(live: Iterable[SliceState], *, is_same: bool) -> dict[int, At]:
    """Return the positions that a new build must reach; those of another source are compared only by time."""
    places = {each.slice: decode_position(each.position).at for each in live}
    # A scan of another build has other positions: it must have ended where this one will.
    places = {number: (at[PLACE_SIZE],) if in_scan(at) else at for number, at in places.items()}
    if is_same:
        return places
    # After an event, others of its time may follow; a position of one element is before all events of its time.
    return {number: (at[0] + 1,) if len(at) > 1 else at for number, at in places.items()}


def _refuse_live_table(tx: ProjectionTx) -> None:
    if tx.used and not tx.asked:
        raise LiveTableWritten()


# ---- the swap: copies of tables under other names, which then replace the live ones


def has_transactional_ddl(dialect: str) -> bool:
    """Return whether a database can rename tables in the transaction that moves the offsets."""
    return dialect in ("postgresql", "sqlite")


def copied(table: Table, suffix: str) -> Table:
    """Return a copy of a table under another name; names of indexes and constraints must differ too."""
    if table.foreign_keys:
        raise InvalidInput(f"table {table.name} has foreign keys: a rebuild cannot copy it")
    copy = table.to_metadata(MetaData(), name=f"{table.name}{suffix}")
    named: list[Any] = [*copy.indexes, *copy.constraints]
    for item in named:
        if isinstance(item.name, str):
            item.name = f"{item.name}{suffix}"
    return copy


class _Rename:
    """The names of a table in a swap, quoted and with its schema; `name` and `old_name` are quoted only."""

    def __init__(self, table: Table, copy: Table, suffix: str, prepare: IdentifierPreparer) -> None:
        self.copy = copy
        old = f"{table.name}{suffix}_old"
        schema = "" if table.schema is None else f"{prepare.quote_schema(table.schema)}."
        self.name, self.old_name = prepare.quote(table.name), prepare.quote(old)
        self.live, self.new, self.old = (f"{schema}{prepare.quote(name)}" for name in (table.name, copy.name, old))


def swap_tables(connection: Connection, tables: Sequence[Table], copies: Mapping[str, Table], suffix: str) -> None:
    """Replace live tables by their copies; those that an announced swap has already renamed are skipped."""
    database, dialect = inspect(connection), connection.dialect
    renames = [_Rename(table, copies[table.key], suffix, dialect.identifier_preparer) for table in tables]
    pending = [each for each in renames if database.has_table(each.copy.name, schema=each.copy.schema)]
    if has_transactional_ddl(dialect.name):
        if missing := [each.copy.key for each in renames if each not in pending]:
            raise Corrupt(f"the rebuild has lost its tables {', '.join(missing)}: start a new rebuild")
        for each in pending:
            connection.execute(text(f"ALTER TABLE {each.live} RENAME TO {each.old_name}"))
            connection.execute(text(f"ALTER TABLE {each.new} RENAME TO {each.name}"))
    elif pending:  # one statement, which is atomic
        steps = [f"{each.live} TO {each.old}, {each.new} TO {each.live}" for each in pending]
        connection.execute(text(f"RENAME TABLE {', '.join(steps)}"))
    for each in renames:
        connection.execute(text(f"DROP TABLE IF EXISTS {each.old}"))
