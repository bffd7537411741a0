"""Declarations of user fields on PostgreSQL: numbered, queue by queue."""

from __future__ import annotations

from tidebook.sql.port.queue import QueueRef
from tidebook.sql.postgres.queue_calls import Calls


class Declarations:
    """The table of declarations."""

    def __init__(self, calls: Calls, schema: str, now: str) -> None:
        self._calls = calls
        self._schema = schema
        self._table = f"{schema}.declaration"
        self._now = now

    async def known(self, queue: QueueRef, fields: bytes) -> int | None:
        """The number of a declaration, an older one too: in a rolling upgrade both are in use for a while."""
        rows = await self._calls.rows(
            f"SELECT max(format) FROM {self._table} WHERE queue = %s AND fields = %s", (queue.id, fields), writes=False
        )
        number: int | None = rows[0][0]
        return number

    async def any(self, queue: QueueRef) -> bool:
        """Whether the queue has any: then entries of an older one may be there."""
        sql = f"SELECT FROM {self._table} WHERE queue = %s LIMIT 1"
        return bool(await self._calls.rows(sql, (queue.id,), writes=False))

    async def add(self, queue: QueueRef, fields: bytes) -> int:
        """Number a declaration, unless somebody has done it meanwhile."""
        async with self._calls.connection() as connection, connection.transaction():
            await connection.execute(f"SELECT FROM {self._schema}.queue WHERE id = %s FOR UPDATE", (queue.id,))
            cursor = await connection.execute(
                f"SELECT max(format), max(format) FILTER (WHERE fields = %s) FROM {self._table} WHERE queue = %s",
                (fields, queue.id),
            )
            found = await cursor.fetchone()
            newest, known = found if found is not None else (None, None)
            if known is not None:
                return int(known)
            number = 1 if newest is None else int(newest) + 1
            await connection.execute(
                f"INSERT INTO {self._table} (queue, format, fields, declared_at) VALUES (%s, %s, %s, {self._now})",
                (queue.id, number, fields),
            )
            return number
