"""Rotation of a queue's partitions: puts go to the current one; older ones are drained, then cleared."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec
from psycopg import errors

from tidebook.postgres.connect import Connection
from tidebook.queue.port import Drained, Period, QueueSettings
from tidebook.queue.postgres.install import add_slot, clear_slot

SLOTS_MAX: Final = 24
#: When a period ends, the last entries of a draining partition are moved on, if there are at most this many.
STRAGGLERS_MAX: Final = 1_000
#: How long clearing and rotating may wait for a lock, since other statements queue up after them.
_LOCK_MS_MAX: Final = 100


class PeriodState(msgspec.Struct, frozen=True):
    """The state of a partitioned table."""

    current: int
    draining: tuple[int, ...]
    began_at: int
    finished: int


def period_end(period: Period, began_at: int) -> int | None:
    """Return when a period that began at `began_at` ends by the UTC calendar; None: never."""
    began = datetime.fromtimestamp(began_at / 1000, UTC)
    day = began.replace(hour=0, minute=0, second=0, microsecond=0)
    match period:
        case "hour":
            return (began_at // 3_600_000 + 1) * 3_600_000
        case "day":
            return int(day.timestamp() * 1000) + 86_400_000
        case "month":
            month = day.year * 12 + day.month  # the next month, counted from 0
            return int(day.replace(year=month // 12, month=month % 12 + 1, day=1).timestamp() * 1000)
        case "ever":
            return None


def is_over(state: PeriodState, settings: QueueSettings, now_ms: int) -> bool:
    """Return whether the period has ended, by the calendar or by the number of finished entries."""
    if settings.period == "ever":
        return False
    end = period_end(settings.period, state.began_at)
    return state.finished >= settings.finished_max or (end is not None and now_ms >= end)


class PartitionRotation:
    """Rotates the partitions of one table."""

    def __init__(self, schema: str, table: str) -> None:
        self._schema = schema
        self._table = table
        self._parent = f"{schema}.{table}"

    async def state(self, connection: Connection, *, lock: bool = False) -> PeriodState:
        """Return the current state."""
        cursor = await connection.execute(
            f"SELECT current_slot, draining, began_at, finished FROM {self._schema}.period WHERE table_name = %s"
            + (" FOR UPDATE" if lock else ""),
            (self._table,),
        )
        row = await cursor.fetchone()
        assert row is not None, "the period's row is created with its table"
        current, draining, began_at, finished = row
        return PeriodState(current, tuple(draining), began_at, finished)

    async def add_finished(self, connection: Connection, count: int) -> None:
        """Add to the number of finished entries."""
        await connection.execute(
            f"UPDATE {self._schema}.period SET finished = finished + %s WHERE table_name = %s", (count, self._table)
        )

    async def rotate(self, connection: Connection, expected: PeriodState, now_ms: int, *, wait: bool = False) -> bool:
        """Begin a new period if the table is still in the expected one; return False if open transactions prevent it.

        `wait`: wait briefly for the lock that puts share, while later puts wait after it.
        """
        try:
            async with connection.transaction():
                if not await self._lock(connection, wait=wait):
                    return False
                state = await self.state(connection, lock=True)
                if state.began_at != expected.began_at:
                    return True
                if not state.finished and not await self._has_entries(connection, state.current):
                    await self._save(connection, state.current, state.draining, now_ms)
                    return True
                target = await self._free_slot(connection, state)
                if target is None:
                    return False
                await self._save(connection, target, (*state.draining, state.current), now_ms)
                for slot in state.draining:
                    await self._move_stragglers(connection, slot, target)
                return True
        except (errors.LockNotAvailable, errors.SerializationFailure, errors.DeadlockDetected):
            return False

    async def clear(self, connection: Connection, slot: int, drained: Drained) -> bool:
        """Clear a drained partition; return False if it is not empty or still in use."""
        if await self._has_entries(connection, slot):
            return False
        try:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS_MAX}")
                if drained != "reset":
                    await connection.execute(f"LOCK TABLE {self._parent}_{slot} IN ACCESS EXCLUSIVE MODE")
                if await self._has_entries(connection, slot):
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

    async def _lock(self, connection: Connection, *, wait: bool) -> bool:
        await connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS_MAX}")
        lock = f"('{self._parent}'::regclass::oid::integer, 1)"
        if wait:
            await connection.execute(f"SELECT pg_advisory_xact_lock{lock}")
            return True
        cursor = await connection.execute(f"SELECT pg_try_advisory_xact_lock{lock}")
        row = await cursor.fetchone()
        return row is not None and bool(row[0])

    async def _has_entries(self, connection: Connection, slot: int) -> bool:
        cursor = await connection.execute(f"SELECT FROM {self._parent} WHERE slot = {int(slot)} LIMIT 1")
        return await cursor.fetchone() is not None

    async def _save(self, connection: Connection, current: int, draining: tuple[int, ...], now_ms: int) -> None:
        await connection.execute(
            f"UPDATE {self._schema}.period SET current_slot = %s, draining = %s::smallint[], began_at = %s,"
            " finished = 0 WHERE table_name = %s",
            (current, list(draining), now_ms, self._table),
        )

    async def _free_slot(self, connection: Connection, state: PeriodState) -> int | None:
        cursor = await connection.execute(
            "SELECT substring(c.relname FROM '[0-9]+$')::integer FROM pg_inherits i"
            f" JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = '{self._parent}'::regclass"
        )
        existing = {slot for (slot,) in await cursor.fetchall()}
        free = existing - {state.current, *state.draining}
        if free:
            return int(min(free))
        slot = next(number for number in range(SLOTS_MAX + 1) if number not in existing)
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
