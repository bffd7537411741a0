"""Declarations of user fields on PostgreSQL: numbered, queue by queue."""

from __future__ import annotations

from tidebook.sql.port.queue import QueueRef
from tidebook.sql.postgres.queue_calls import Calls


class Declarations:
    """The table of declarations."""

    def __init__(self, calls: Calls, schema: str, now: str) -> None:
        self._calls = calls
        self._schema = schema
        self._now = now

    async def number(self, queue: QueueRef, fields: bytes) -> tuple[int, bool]:
        """The number of a declaration, and whether it is a change: entries of an older one may be there."""
        table = f"{self._schema}.declaration"
        async with self._calls.connection() as connection, connection.transaction():
            await connection.execute(f"SELECT FROM {self._schema}.queue WHERE id = %s FOR UPDATE", (queue.id,))
            cursor = await connection.execute(
                f"SELECT format, fields FROM {table} WHERE queue = %s ORDER BY format DESC LIMIT 1", (queue.id,)
            )
            found = await cursor.fetchone()
            if found is not None and bytes(found[1]) == fields:
                return int(found[0]), False
            number = 1 if found is None else int(found[0]) + 1
            await connection.execute(
                f"INSERT INTO {table} (queue, format, fields, declared_at) VALUES (%s, %s, %s, {self._now})",
                (queue.id, number, fields),
            )
            return number, number > 1
