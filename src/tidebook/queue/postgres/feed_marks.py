"""Feed marks on PostgreSQL: how far a source was put, moved in the transaction of the put."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from tidebook.postgres.connect import Connection
from tidebook.queue.port import NewEntry, Put, QueueRef, Step
from tidebook.queue.postgres.arguments import put_parameters
from tidebook.queue.postgres.statement_runner import StatementRunner


class PostgresFeedMarks:
    """The table of marks."""

    def __init__(self, runner: StatementRunner, schema: str, now: str) -> None:
        self._runner = runner
        self._mark = f"{schema}.mark"
        self._now = now

    async def all(self, queue: QueueRef, source: str) -> dict[int, str]:
        """Return the mark of each part of a source."""
        sql = f"SELECT part, place FROM {self._mark} WHERE queue = %s AND source = %s"
        rows = await self._runner.rows(sql, (queue.id, source), writes=False)
        return dict(rows)

    async def put(
        self,
        queue: QueueRef,
        put: str,
        entries: Sequence[NewEntry],
        inserted_at: int,
        source: str,
        steps: Sequence[Step],
    ) -> Put | None:
        """Move the marks and put the entries; return None if a mark has moved."""
        done: Put | None = None
        async with self._runner.connection(puts=True) as connection, connection.transaction():
            await connection.execute(f"SET LOCAL synchronous_commit = {queue.settings.synchronous}")
            for step in sorted(steps, key=_part_of):  # in one order, so that two transactions never deadlock
                if not await self._move(connection, queue, source, step):
                    raise psycopg.Rollback
            if entries:
                cursor = await connection.execute(put, put_parameters(queue, entries, inserted_at))
            else:
                cursor = await connection.execute(f"SELECT {self._now}, 0")
            row: Any = await cursor.fetchone()
            now_ms, merged = row
            done = Put(len(entries) - merged, merged, now_ms)
        return done

    async def _move(self, connection: Connection, queue: QueueRef, source: str, step: Step) -> bool:
        key = (queue.id, source, step.part)
        if step.before is None:
            sql = f"INSERT INTO {self._mark} VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"
            cursor = await connection.execute(sql, (*key, step.after))
        else:
            sql = f"UPDATE {self._mark} SET place = %s WHERE queue = %s AND source = %s AND part = %s AND place = %s"
            cursor = await connection.execute(sql, (step.after, *key, step.before))
        return cursor.rowcount == 1


def _part_of(step: Step) -> int:
    return step.part
