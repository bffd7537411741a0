"""Dead letters on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidebook.sql.port.queue import Flag, NewEntry, QueueRef
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.queries.queue.arguments import numbers, put_parameters
from tidebook.sql.queries.queue.statements import FLAG_COLUMNS


class Flags:
    """The table of dead letters; each row is a flag that was raised."""

    def __init__(self, calls: Calls, schema: str, now: str) -> None:
        self._calls = calls
        self._dead = f"{schema}.dead"
        self._queue = f"{schema}.queue"
        self._now = now
        self._select = f"SELECT {FLAG_COLUMNS} FROM {schema}.dead d JOIN {schema}.queue q ON q.id = d.queue"

    async def all(self, queue: QueueRef | None, limit: int) -> list[Flag]:
        """Newest first."""
        where = "" if queue is None else f" WHERE d.queue = {int(queue.id)}"
        rows = await self._calls.rows(f"{self._select}{where} ORDER BY d.id DESC LIMIT %s", (limit,), writes=False)
        return [Flag(*row) for row in rows]

    async def count(self, queue: QueueRef) -> int:
        """How many a queue has."""
        rows = await self._calls.rows(f"SELECT count(*) FROM {self._dead} WHERE queue = %s", (queue.id,), writes=False)
        return int(rows[0][0])

    async def retry(self, queue: QueueRef, flag: int, put: str) -> bool:
        """Put a dead letter back: it waits from now on, with its key, priority and data."""
        async with self._calls.connection() as connection, connection.transaction():
            cursor = await connection.execute(
                f"DELETE FROM {self._dead} WHERE id = %s AND queue = %s"
                " RETURNING uuid_send(keyhash), kind, data, key, priority, inserted_at, expires_at, format,"
                f" {self._now}",
                (flag, queue.id),
                binary=True,
            )
            row = await cursor.fetchone()
            if row is None:
                return False
            keyhash, kind, data, key, priority, inserted_at, expires_at, number, now_ms = row
            queue = msgspec.structs.replace(queue, format=number)
            entry = NewEntry(keyhash, kind, data, key, priority)
            if expires_at > now_ms:  # one that has expired since would never be handed out
                entry = NewEntry(keyhash, kind, data, key, priority, None, expires_at)
            await connection.execute(put, put_parameters(queue, [entry], inserted_at))
            return True

    async def edit(self, queue: QueueRef, flag: int, kind: int, data: bytes) -> bool:
        """Replace the user data, which was checked against the declaration that is in force now."""
        rows = await self._calls.rows(
            f"UPDATE {self._dead} SET kind = %s, data = %s, format = %s WHERE id = %s AND queue = %s RETURNING id",
            (kind, data, queue.format, flag, queue.id),
        )
        return bool(rows)

    async def drop(self, queue: QueueRef, flag: int) -> bool:
        """Delete it."""
        sql = f"DELETE FROM {self._dead} WHERE id = %s AND queue = %s RETURNING id"
        return bool(await self._calls.rows(sql, (flag, queue.id)))

    async def unannounced(self, limit: int, hold_ms: int) -> list[Flag]:
        """Oldest first; what another process tells of just now is left to it."""
        rows = await self._calls.rows(
            f"""WITH free AS MATERIALIZED (
                SELECT id FROM {self._dead} WHERE announced_at IS NULL AND telling_until <= {self._now}
                ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)
            UPDATE {self._dead} d SET telling_until = {self._now} + %s FROM free, {self._queue} q
            WHERE d.id = free.id AND q.id = d.queue RETURNING {FLAG_COLUMNS}""",
            (limit, hold_ms),
        )
        return sorted((Flag(*row) for row in rows), key=lambda flag: flag.id)

    async def announced(self, flags: Sequence[int]) -> None:
        """Mark them."""
        await self._calls.rows(
            f"UPDATE {self._dead} SET announced_at = {self._now} WHERE id = ANY (%s::text::bigint[]) RETURNING id",
            (numbers(flags),),
        )
