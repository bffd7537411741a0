"""Periods: a ring of tables under one parent. Entries go to the current one; older ones are drained and cleared."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec
from psycopg import errors

from tidebook.sql.port.queue import Drained, Period, QueueSettings
from tidebook.sql.postgres.connect import Connection
from tidebook.sql.postgres.queue_install import add_slot, clear_slot

SLOTS_MAX: Final = 24
#: A drained table's last entries are moved on when a period ends, if they are no more than these.
STRAGGLERS_MAX: Final = 1_000
#: How long clearing and turning may wait for those who use the tables; they wait behind it.
_LOCK_MS_MAX: Final = 100


class PeriodState(msgspec.Struct, frozen=True):
    """A group of period tables as it stands."""

    current: int
    draining: tuple[int, ...]
    began_at: int
    finished: int


def period_end(period: Period, began_at: int) -> int | None:
    """When a period that began then ends by the calendar (UTC); None: never."""
    began = datetime.fromtimestamp(began_at / 1000, UTC)
    day = began.replace(hour=0, minute=0, second=0, microsecond=0)
    match period:
        case "hour":
            return (began_at // 3_600_000 + 1) * 3_600_000
        case "day":
            return int(day.timestamp() * 1000) + 86_400_000
        case "month":
            month = day.year * 12 + day.month  # the next one, counted from 0
            return int(day.replace(year=month // 12, month=month % 12 + 1, day=1).timestamp() * 1000)
        case "ever":
            return None


def is_over(state: PeriodState, settings: QueueSettings, now_ms: int) -> bool:
    """Whether the period has ended, by the calendar or by what was finished in it."""
    if settings.period == "ever":
        return False
    end = period_end(settings.period, state.began_at)
    return state.finished >= settings.finished_max or (end is not None and now_ms >= end)


class Periods:
    """Turns the ring of one parent table."""

    def __init__(self, schema: str, table: str) -> None:
        self._schema = schema
        self._table = table
        self._parent = f"{schema}.{table}"

    async def state(self, connection: Connection, *, lock: bool = False) -> PeriodState:
        """How it stands."""
        cursor = await connection.execute(
            f"SELECT current_slot, draining, began_at, finished FROM {self._schema}.period WHERE table_name = %s"
            + (" FOR UPDATE" if lock else ""),
            (self._table,),
        )
        row = await cursor.fetchone()
        assert row is not None, "the period's row is made with its table"
        current, draining, began_at, finished = row
        return PeriodState(current, tuple(draining), began_at, finished)

    async def add_finished(self, connection: Connection, count: int) -> None:
        """Count what was finished."""
        await connection.execute(
            f"UPDATE {self._schema}.period SET finished = finished + %s WHERE table_name = %s", (count, self._table)
        )

    async def turn(self, connection: Connection, seen: PeriodState, now_ms: int, *, patient: bool = False) -> bool:
        """Begin a new period if it is still the one that was seen; False where others keep the tables busy.

        `patient`: wait in line for those who put, and let those who come later wait behind. For a moment only.
        """
        try:
            async with connection.transaction():
                if not await self._begin_alone(connection, patient=patient):
                    return False
                state = await self.state(connection, lock=True)
                if state.began_at != seen.began_at:
                    return True
                if not state.finished and not await self._any(connection, state.current):
                    await self._set(connection, state.current, state.draining, now_ms)
                    return True
                target = await self._empty_slot(connection, state)
                if target is None:
                    return False
                await self._set(connection, target, (*state.draining, state.current), now_ms)
                for slot in state.draining:
                    await self._move_stragglers(connection, slot, target)
                return True
        except (errors.LockNotAvailable, errors.SerializationFailure, errors.DeadlockDetected):
            return False

    async def clear(self, connection: Connection, slot: int, drained: Drained) -> bool:
        """Clear a drained table; False where it is not empty, or somebody still uses it."""
        if await self._any(connection, slot):
            return False
        try:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS_MAX}")
                if drained != "reset":
                    await connection.execute(f"LOCK TABLE {self._parent}_{slot} IN ACCESS EXCLUSIVE MODE")
                if await self._any(connection, slot):
                    return False
                await clear_slot(connection, self._table, slot, drained, schema=self._schema)
                await connection.execute(
                    f"UPDATE {self._schema}.period SET draining = array_remove(draining, %s::smallint)"
                    " WHERE table_name = %s",
                    (slot, self._table),
                )
                return True
        except (errors.LockNotAvailable, errors.DeadlockDetected, errors.UndefinedTable):
            return False

    async def _begin_alone(self, connection: Connection, *, patient: bool) -> bool:
        await connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS_MAX}")
        lock = f"('{self._parent}'::regclass::oid::integer, 1)"
        if patient:
            await connection.execute(f"SELECT pg_advisory_xact_lock{lock}")
            return True
        cursor = await connection.execute(f"SELECT pg_try_advisory_xact_lock{lock}")
        row = await cursor.fetchone()
        return row is not None and bool(row[0])

    async def _any(self, connection: Connection, slot: int) -> bool:
        cursor = await connection.execute(f"SELECT FROM {self._parent} WHERE slot = {int(slot)} LIMIT 1")
        return await cursor.fetchone() is not None

    async def _set(self, connection: Connection, current: int, draining: tuple[int, ...], now_ms: int) -> None:
        await connection.execute(
            f"UPDATE {self._schema}.period SET current_slot = %s, draining = %s::smallint[], began_at = %s,"
            " finished = 0 WHERE table_name = %s",
            (current, list(draining), now_ms, self._table),
        )

    async def _empty_slot(self, connection: Connection, state: PeriodState) -> int | None:
        cursor = await connection.execute(
            "SELECT substring(c.relname FROM '[0-9]+$')::integer FROM pg_inherits i"
            f" JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = '{self._parent}'::regclass"
        )
        there = {slot for (slot,) in await cursor.fetchall()}
        free = there - {state.current, *state.draining}
        if free:
            return int(min(free))
        slot = next(number for number in range(SLOTS_MAX + 1) if number not in there)
        if slot == SLOTS_MAX:
            return None
        await add_slot(connection, self._table, slot, schema=self._schema)
        return slot

    async def _move_stragglers(self, connection: Connection, slot: int, target: int) -> None:
        cursor = await connection.execute(
            f"SELECT count(*) FROM (SELECT FROM {self._parent} WHERE slot = %s LIMIT %s) AS few",
            (slot, STRAGGLERS_MAX + 1),
        )
        row = await cursor.fetchone()
        if row is not None and 0 < row[0] <= STRAGGLERS_MAX:
            await connection.execute(f"UPDATE {self._parent} SET slot = %s WHERE slot = %s", (target, slot))
