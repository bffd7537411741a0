"""The partitions of the queues' tables: puts go to the current one; older ones are drained, then cleared."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from psycopg import errors

from tidebook.core.errors import Unavailable
from tidebook.postgres.connect import Connection
from tidebook.queue.port import NEVER_MS, Period, QueueRef, QueueSettings
from tidebook.queue.postgres.install import add_slot
from tidebook.queue.postgres.statement_runner import StatementRunner

SLOTS_MAX: Final = 24
#: When a period ends, a draining partition with at most this many entries is emptied into the current one.
STRAGGLERS_MAX: Final = 1_000
#: How long clearing and rotating may wait for a lock, since other statements queue up after them.
_LOCK_MS_MAX: Final = 100
#: A rotation or a clearing that failed is retried after this time.
RETRY_MS: Final = 1_000
BEGIN_ATTEMPTS_MAX: Final = 30
BEGIN_PAUSE_S: Final = 0.1
#: A rotation only tries its lock, so that puts never queue up after it; one of this many attempts waits for the lock,
#: because under constant puts no attempt would ever find it free.
WAIT_EVERY: Final = 5


class PeriodState(NamedTuple):
    """The state of a partitioned table."""

    current: int
    draining: list[int]
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
    end = period_end(settings.period, state.began_at)
    return end is not None and (state.finished >= settings.finished_max or now_ms >= end)


class Partitions:
    """Rotates and clears the partitions of the queues that this process uses."""

    def __init__(self, runner: StatementRunner, schema: str) -> None:
        self._runner = runner
        self._schema = schema
        self._finished: dict[str, int] = {}
        self._attempts: dict[str, int] = {}

    def count(self, queue: QueueRef, finished: int) -> None:
        """Count rows that were deleted or replaced since the last sweep: their dead versions are in the partition."""
        self._finished[queue.table] = self._finished.get(queue.table, 0) + finished

    async def rotate_and_clear(self, queue: QueueRef, now_ms: int) -> int:
        """Rotate and clear the partitions of a queue where due; return when to call it next."""
        table, settings = queue.table, queue.settings
        async with self._runner.connection() as connection:
            if finished := self._finished.pop(table, 0):
                await connection.execute(
                    f"UPDATE {self._schema}.period SET finished = finished + %s WHERE table_name = %s",
                    (finished, table),
                )
            state = await self._state(connection, table)
            rotated = True
            if is_over(state, settings, now_ms):
                rotated = await self._rotate(connection, table, state, now_ms)
                state = await self._state(connection, table)
            undrained = [slot for slot in state.draining if not await self._clear(connection, table, slot, settings)]
        if not rotated or undrained:
            return now_ms + RETRY_MS
        end = period_end(settings.period, state.began_at)
        return NEVER_MS if end is None else end

    async def begin(self, queue: QueueRef) -> None:
        """Rotate to a new partition now; raise Unavailable if open transactions prevent it."""
        for _ in range(BEGIN_ATTEMPTS_MAX):
            async with self._runner.connection() as connection:
                state = await self._state(connection, queue.table)
                if await self._rotate(connection, queue.table, state, state.began_at + 1):
                    return
            await asyncio.sleep(BEGIN_PAUSE_S)
        raise Unavailable(
            f"queue {queue.name!r}: open transactions keep its table busy, so it cannot be rotated: try again later"
        )

    async def _state(self, connection: Connection, table: str, lock: str = "") -> PeriodState:
        columns = "current_slot, draining, began_at, finished"
        sql = f"SELECT {columns} FROM {self._schema}.period WHERE table_name = %s {lock}"
        return PeriodState(*await _row(connection, sql, (table,)))

    async def _rotate(self, connection: Connection, table: str, expected: PeriodState, now_ms: int) -> bool:
        """Begin a new period if the table is still in the expected one; return False if open transactions prevent it.

        Some attempts wait briefly for the lock that puts share, while later puts queue up after it.
        """
        self._attempts[table] = attempts = self._attempts.get(table, 0) + 1
        function = "pg_advisory_xact_lock" if attempts % WAIT_EVERY == 0 else "pg_try_advisory_xact_lock"
        try:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS_MAX}")
                locked = await _row(
                    connection, f"SELECT {function}('{self._schema}.{table}'::regclass::oid::integer, 1)"
                )
                if locked[0] is False:
                    return False
                state = await self._state(connection, table, "FOR UPDATE")
                if state.began_at != expected.began_at:
                    return True
                target, draining = state.current, state.draining
                if state.finished or await self._has_entries(connection, table, state.current):
                    free = await self._free_slot(connection, table, state)
                    if free is None:
                        return False
                    target, draining = free, [*state.draining, state.current]
                await connection.execute(
                    f"UPDATE {self._schema}.period SET current_slot = %s, draining = %s::smallint[], began_at = %s,"
                    " finished = 0 WHERE table_name = %s",
                    (target, draining, now_ms, table),
                )
                if target != state.current:
                    for slot in state.draining:
                        await self._move_stragglers(connection, table, slot, target)
                return True
        except (errors.LockNotAvailable, errors.SerializationFailure, errors.DeadlockDetected):
            return False

    async def _clear(self, connection: Connection, table: str, slot: int, settings: QueueSettings) -> bool:
        """Clear a drained partition; return False if it is not empty or still in use."""
        if await self._has_entries(connection, table, slot):
            return False
        drained = settings.drained
        name = f"{self._schema}.{table}_{slot}"
        try:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS_MAX}")
                if drained != "reset":
                    await connection.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
                if await self._has_entries(connection, table, slot):
                    return False
                if drained != "reset":  # vacuum frees the pages of a partition that is kept
                    await connection.execute(f"{'TRUNCATE' if drained == 'truncate' else 'DROP TABLE'} {name}")
                await connection.execute(
                    f"UPDATE {self._schema}.period SET draining = array_remove(draining, %s::smallint)"
                    " WHERE table_name = %s",
                    (slot, table),
                )
                return True
        except (errors.LockNotAvailable, errors.DeadlockDetected, errors.UndefinedTable):
            return False

    async def _has_entries(self, connection: Connection, table: str, slot: int) -> bool:
        cursor = await connection.execute(f"SELECT FROM {self._schema}.{table} WHERE slot = {int(slot)} LIMIT 1")
        return await cursor.fetchone() is not None

    async def _free_slot(self, connection: Connection, table: str, state: PeriodState) -> int | None:
        cursor = await connection.execute(
            "SELECT substring(c.relname FROM '[0-9]+$')::integer FROM pg_inherits i"
            f" JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = '{self._schema}.{table}'::regclass"
        )
        existing = {slot for (slot,) in await cursor.fetchall()}
        free = existing - {state.current, *state.draining}
        if free:
            return int(min(free))
        slot = next(number for number in range(SLOTS_MAX + 1) if number not in existing)
        if slot == SLOTS_MAX:
            return None
        await add_slot(connection, table, slot, schema=self._schema)
        return slot

    async def _move_stragglers(self, connection: Connection, table: str, slot: int, target: int) -> None:
        few = f"SELECT count(*) FROM (SELECT FROM {self._schema}.{table} WHERE slot = %s LIMIT %s) AS few"
        (count,) = await _row(connection, few, (slot, STRAGGLERS_MAX + 1))
        if 0 < count <= STRAGGLERS_MAX:
            await connection.execute(f"UPDATE {self._schema}.{table} SET slot = %s WHERE slot = %s", (target, slot))


async def _row(connection: Connection, sql: str, parameters: tuple[object, ...] = ()) -> Any:
    cursor = await connection.execute(sql, parameters)
    return await cursor.fetchone()
