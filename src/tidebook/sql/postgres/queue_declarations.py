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
                f"SELECT max(format), max(format) FILTER (WHERE fields = %s) FROM {table} WHERE queue = %s",
                (fields, queue.id),
            )
            found = await cursor.fetchone()
            newest, known = found if found is not None else (None, None)
            if known is not None:  # an older one too: in a rolling upgrade both are in use for a while
                return int(known), False
            number = 1 if newest is None else int(newest) + 1
            await connection.execute(
                f"INSERT INTO {table} (queue, format, fields, declared_at) VALUES (%s, %s, %s, {self._now})",
                (queue.id, number, fields),
            )
            return number, number > 1
