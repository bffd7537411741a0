"""Maintenance of the partitions: count finished entries, rotate to a new partition, clear drained ones."""

from __future__ import annotations

import asyncio

from tidebook.core.errors import Unavailable
from tidebook.queue.port import NEVER_MS, QueueRef
from tidebook.queue.postgres.partition_rotation import PartitionRotation, is_over, period_end
from tidebook.queue.postgres.statement_runner import StatementRunner

#: A rotation or a clearing that failed is retried after this time.
RETRY_MS = 1_000
BEGIN_ATTEMPTS_MAX = 30
BEGIN_PAUSE_S = 0.1
#: A rotation only tries its lock, so that puts never queue up after it; one of this many attempts waits for the lock,
#: because under constant puts no attempt would ever find it free.
WAIT_EVERY = 5


class PartitionMaintenance:
    """Maintains the partitions of the queues that this process uses."""

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
        rotation = PartitionRotation(self._schema, queue.table)
        settings = queue.settings
        async with self._runner.connection() as connection:
            finished = self._finished.pop(queue.table, 0)
            if finished:
                await rotation.add_finished(connection, finished)
            state = await rotation.state(connection)
            rotated = True
            if is_over(state, settings, now_ms):
                rotated = await rotation.rotate(connection, state, now_ms, wait=self._waits_for_lock(queue))
                state = await rotation.state(connection)
            undrained = [
                slot for slot in state.draining if not await rotation.clear(connection, slot, settings.drained)
            ]
        if not rotated or undrained:
            return now_ms + RETRY_MS
        end = period_end(settings.period, state.began_at)
        return NEVER_MS if end is None else end

    def _waits_for_lock(self, queue: QueueRef) -> bool:
        self._attempts[queue.table] = attempts = self._attempts.get(queue.table, 0) + 1
        return attempts % WAIT_EVERY == 0

    async def begin(self, queue: QueueRef) -> None:
        """Rotate to a new partition now; raise Unavailable if open transactions prevent it."""
        rotation = PartitionRotation(self._schema, queue.table)
        for _ in range(BEGIN_ATTEMPTS_MAX):
            async with self._runner.connection() as connection:
                state = await rotation.state(connection)
                if await rotation.rotate(connection, state, state.began_at + 1, wait=self._waits_for_lock(queue)):
                    return
            await asyncio.sleep(BEGIN_PAUSE_S)
        raise Unavailable(
            f"queue {queue.name!r}: open transactions keep its table busy, so it cannot be rotated: try again later"
        )

    async def tables(self, queue: QueueRef) -> int:
        """Return how many partitions may hold entries."""
        async with self._runner.connection(writes=False) as connection:
            return 1 + len((await PartitionRotation(self._schema, queue.table).state(connection)).draining)
