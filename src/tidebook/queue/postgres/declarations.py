"""Declarations of user fields on PostgreSQL, numbered for each queue."""

from __future__ import annotations

from tidebook.queue.port import QueueRef
from tidebook.queue.postgres.statement_runner import StatementRunner


class Declarations:
    """The table of declarations."""

    def __init__(self, runner: StatementRunner, schema: str, now: str) -> None:
        self._runner = runner
        self._schema = schema
        self._table = f"{schema}.declaration"
        self._now = now

    async def number_of(self, queue: QueueRef, fields: bytes) -> int | None:
        """Return the number of a declaration, also of an older one: a rolling upgrade uses both."""
        rows = await self._runner.rows(
            f"SELECT max(format) FROM {self._table} WHERE queue = %s AND fields = %s", (queue.id, fields), writes=False
        )
        number: int | None = rows[0][0]
        return number

    async def any(self, queue: QueueRef) -> bool:
        """Return whether the queue has a declaration: then entries of an older one may be stored."""
        sql = f"SELECT FROM {self._table} WHERE queue = %s LIMIT 1"
        return bool(await self._runner.rows(sql, (queue.id,), writes=False))

    async def add(self, queue: QueueRef, fields: bytes) -> int:
        """Return the number of a declaration, a new one unless another process has added it."""
        async with self._runner.connection() as connection, connection.transaction():
            await connection.execute(f"SELECT FROM {self._schema}.queue WHERE id = %s FOR UPDATE", (queue.id,))
            cursor = await connection.execute(
                f"SELECT max(format), max(format) FILTER (WHERE fields = %s) FROM {self._table} WHERE queue = %s",
                (fields, queue.id),
            )
            found = await cursor.fetchone()
            newest, number_of = found if found is not None else (None, None)
            if number_of is not None:
                return int(number_of)
            number = 1 if newest is None else int(newest) + 1
            await connection.execute(
                f"INSERT INTO {self._table} (queue, format, fields, declared_at) VALUES (%s, %s, %s, {self._now})",
                (queue.id, number, fields),
            )
            return number
