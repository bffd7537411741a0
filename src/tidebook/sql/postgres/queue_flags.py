"""Dead letters on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from tidebook.sql.port.queue import Flag, NewEntry, QueueRef
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.queries.queue.arguments import numbers, put_parameters
from tidebook.sql.queries.queue.statements import FLAG_COLUMNS


class Flags:
    """The table of dead letters; each row is a flag that was raised."""

    def __init__(self, calls: Calls, schema: str, now: str) -> None:
        self._calls = calls
        self._dead = f"{schema}.dead"
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

    async def retry(self, flag: int, queue: QueueRef, put: str) -> bool:
        """Put a dead letter back: it waits from now on, with its key, priority and data."""
        async with self._calls.connection() as connection, connection.transaction():
            cursor = await connection.execute(
                f"DELETE FROM {self._dead} WHERE id = %s"
                f" RETURNING uuid_send(keyhash), kind, data, key, priority, inserted_at, expires_at, {self._now}",
                (flag,),
                binary=True,
            )
            row = await cursor.fetchone()
            if row is None:
                return False
            keyhash, kind, data, key, priority, inserted_at, expires_at, now_ms = row
            entry = NewEntry(keyhash, kind, data, key, priority)
            if expires_at > now_ms:  # one that has expired since would never be handed out
                entry = NewEntry(keyhash, kind, data, key, priority, None, expires_at)
            await connection.execute(put, put_parameters(queue, [entry], inserted_at))
            return True

    async def edit(self, flag: int, kind: int, data: bytes) -> bool:
        """Replace the user data."""
        rows = await self._calls.rows(
            f"UPDATE {self._dead} SET kind = %s, data = %s WHERE id = %s RETURNING id", (kind, data, flag)
        )
        return bool(rows)

    async def drop(self, flag: int) -> bool:
        """Delete it."""
        return bool(await self._calls.rows(f"DELETE FROM {self._dead} WHERE id = %s RETURNING id", (flag,)))

    async def unannounced(self, limit: int) -> list[Flag]:
        """Oldest first."""
        rows = await self._calls.rows(
            f"{self._select} WHERE d.announced_at IS NULL ORDER BY d.id LIMIT %s", (limit,), writes=False
        )
        return [Flag(*row) for row in rows]

    async def announced(self, flags: Sequence[int]) -> None:
        """Mark them."""
        await self._calls.rows(
            f"UPDATE {self._dead} SET announced_at = {self._now} WHERE id = ANY (%s::text::bigint[]) RETURNING id",
            (numbers(flags),),
        )
