"""Keeping the period tables: counting what is finished, turning the ring, clearing what was drained."""

from __future__ import annotations

import asyncio

from tidebook.core.errors import Unavailable
from tidebook.sql.port.queue import NEVER_MS, QueueRef
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.postgres.queue_periods import Periods, is_over, period_end

#: When a turn or a clearing did not come through, it is tried again after this time.
AGAIN_MS = 1_000
BEGIN_TRIES_MAX = 30
BEGIN_PAUSE_S = 0.1
#: A turn only tries its lock, so that puts never wait behind it; one of so many waits in line for it. Where puts come
#: all the time, no try would ever find a gap.
PATIENT_EVERY = 5


class Keeping:
    """The period tables of all queues of a store, as far as this process works with them."""

    def __init__(self, calls: Calls, schema: str) -> None:
        self._calls = calls
        self._schema = schema
        self._finished: dict[str, int] = {}
        self._turns: dict[str, int] = {}

    def count(self, queue: QueueRef, finished: int) -> None:
        """Remember until the next sweep how many rows were deleted or replaced: their old versions lie in the table."""
        self._finished[queue.table] = self._finished.get(queue.table, 0) + finished

    async def keep(self, queue: QueueRef, now_ms: int) -> int:
        """Do what is due for a queue's tables; when to look next."""
        periods = Periods(self._schema, queue.table)
        settings = queue.settings
        async with self._calls.connection() as connection:
            finished = self._finished.pop(queue.table, 0)
            if finished:
                await periods.add_finished(connection, finished)
            state = await periods.state(connection)
            turned = True
            if is_over(state, settings, now_ms):
                turned = await periods.turn(connection, state, now_ms, patient=self._is_patient(queue))
                state = await periods.state(connection)
            left = [slot for slot in state.draining if not await periods.clear(connection, slot, settings.drained)]
        if not turned or left:
            return now_ms + AGAIN_MS
        end = period_end(settings.period, state.began_at)
        return NEVER_MS if end is None else end

    def _is_patient(self, queue: QueueRef) -> bool:
        self._turns[queue.table] = turns = self._turns.get(queue.table, 0) + 1
        return turns % PATIENT_EVERY == 0

    async def begin(self, queue: QueueRef) -> None:
        """Begin a new table now."""
        periods = Periods(self._schema, queue.table)
        for _ in range(BEGIN_TRIES_MAX):
            async with self._calls.connection() as connection:
                state = await periods.state(connection)
                if await periods.turn(connection, state, state.began_at + 1, patient=self._is_patient(queue)):
                    return
            await asyncio.sleep(BEGIN_PAUSE_S)
        raise Unavailable(
            f"queue {queue.name!r}: open transactions keep its table busy, and no new one can be begun: try again later"
        )

    async def tables(self, queue: QueueRef) -> int:
        """How many period tables hold entries, or may."""
        async with self._calls.connection(writes=False) as connection:
            return 1 + len((await Periods(self._schema, queue.table).state(connection)).draining)
