"""Dead letters on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import psycopg

from tidebook.core.errors import Unavailable
from tidebook.postgres.connect import Connection
from tidebook.queue.port import NEVER_MS, DeadLetterRow, NewEntry, QueueRef
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.statements import LETTER_COLUMNS, PUT, number_array, put_parameters, statement

#: How many times the retry of a dead letter is attempted while entries with its key are put concurrently.
ATTEMPTS_MAX = 10


class PostgresDeadLetters:
    """The part of the store that keeps dead letters."""

    _runner: StatementRunner
    _schema: str
    _now: str

    async def dead_letters(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[DeadLetterRow]:
        where = "" if queue is None else f" WHERE d.queue = {int(queue.id)}"
        rows = await self._runner.rows(
            f"SELECT {LETTER_COLUMNS} FROM {self._schema}.dead d JOIN {self._schema}.queue q ON q.id = d.queue{where}"
            " ORDER BY d.id DESC LIMIT %s",
            (limit,),
            writes=False,
        )
        return [DeadLetterRow(*row) for row in rows]

    async def retry(self, queue: QueueRef, id: int) -> bool:
        return await self.retry_all(queue, [id]) == 1

    async def retry_all(self, queue: QueueRef, ids: Sequence[int]) -> int:
        async with self._runner.connection(puts=True) as connection, connection.transaction():
            await connection.execute(f"SET LOCAL synchronous_commit = {queue.settings.synchronous}")
            return sum([await self._retry(connection, queue, id) for id in ids])

    async def drop_all(self, queue: QueueRef, ids: Sequence[int]) -> int:
        sql = f"DELETE FROM {self._schema}.dead WHERE id = ANY (%s::text::bigint[]) AND queue = %s RETURNING id"
        return len(await self._runner.rows(sql, (number_array(ids), queue.id), level=queue.settings.synchronous))

    async def _retry(self, connection: Connection, queue: QueueRef, id: int) -> bool:
        cursor = await connection.execute(
            f"DELETE FROM {self._schema}.dead WHERE id = %s AND queue = %s"
            " RETURNING uuid_send(keyhash), kind, data, key, priority, inserted_at, expires_at, format, trace,"
            f" {self._now}",
            (id, queue.id),
            binary=True,
        )
        row = await cursor.fetchone()
        if row is None:
            return False
        keyhash, kind, data, key, priority, inserted_at, expires_at, format, trace, now_ms = row
        if expires_at <= now_ms:  # otherwise it would never be claimed
            expires_at = NEVER_MS
        entry = NewEntry(keyhash, kind, data, key, priority, None, expires_at, trace)
        for _ in range(ATTEMPTS_MAX):
            if key is not None and await self._merge_into_waiting(connection, queue, entry, inserted_at):
                return True
            if await self._insert(connection, queue, entry, inserted_at, format):
                return True
        raise Unavailable(f"queue {queue.name!r}: other processes keep putting and claiming {key}: try again later")

    async def _merge_into_waiting(
        self, connection: Connection, queue: QueueRef, letter: NewEntry, inserted_at: int
    ) -> bool:
        """Merge a letter into the waiting entry of its key, which keeps its newer data; return False if there is none.

        An entry with an expired lease counts as waiting; its worker loses it, because the token is cleared.
        """
        for waiting in ("status = 'W'", "status = 'P' AND lease_until = 0"):
            cursor = await connection.execute(
                f"UPDATE {self._schema}.{queue.table} SET timeouts = 0, inserted_at = %s, token = NULL,"
                " priority = least(priority, %s), expires_at = greatest(expires_at, %s),"
                f" process_at = greatest(process_at, {self._now})"
                f" WHERE queue = %s AND {waiting} AND keyhash = %s::text::uuid AND expires_at > {self._now}",
                (inserted_at, letter.priority, letter.expires_at, queue.id, letter.keyhash.hex()),
            )
            if cursor.rowcount > 0:
                return True
        return False

    async def _insert(
        self, connection: Connection, queue: QueueRef, letter: NewEntry, inserted_at: int, format: int
    ) -> bool:
        """Put a letter as a new entry, with the data of the entry of its key that is being processed, if there is one.

        Return False, and change nothing, if an entry of its key is waiting by now.
        """
        done = False
        async with connection.transaction():
            if letter.key is not None:
                cursor = await connection.execute(
                    f"SELECT kind, data, format, trace FROM {self._schema}.{queue.table} WHERE queue = %s"
                    " AND status = 'P' AND keyhash = %s::text::uuid ORDER BY id DESC LIMIT 1",
                    (queue.id, letter.keyhash.hex()),
                    binary=True,
                )
                held = await cursor.fetchone()
                if held is not None:
                    kind, data, format, trace = held
                    letter = msgspec.structs.replace(letter, kind=kind, data=data, trace=trace)
            ref = msgspec.structs.replace(queue, format=format)
            put = statement(PUT, self._schema, queue.table, self._now)
            cursor = await connection.execute(put, put_parameters(ref, [letter], inserted_at))
            row = await cursor.fetchone()
            done = row is not None and bool(row[1] == 0)
            if not done:
                raise psycopg.Rollback
        return done

    async def edit(self, queue: QueueRef, id: int, kind: int, data: bytes) -> bool:
        """Replace the user data, which was checked against the current declaration."""
        rows = await self._runner.rows(
            f"UPDATE {self._schema}.dead SET kind = %s, data = %s, format = %s WHERE id = %s AND queue = %s"
            " RETURNING id",
            (kind, data, queue.format, id, queue.id),
            level=queue.settings.synchronous,
        )
        return bool(rows)

    async def drop(self, queue: QueueRef, id: int) -> bool:
        return await self.drop_all(queue, [id]) == 1

    async def unannounced(self, *, limit: int = 100, hold_ms: int = 0) -> list[DeadLetterRow]:
        """Return and reserve dead letters, oldest first; skip those that another process has reserved."""
        rows = await self._runner.rows(
            f"""WITH free AS MATERIALIZED (
                SELECT id FROM {self._schema}.dead WHERE announced_at IS NULL AND reserved_until <= {self._now}
                ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)
            UPDATE {self._schema}.dead d SET reserved_until = {self._now} + %s FROM free, {self._schema}.queue q
            WHERE d.id = free.id AND q.id = d.queue RETURNING {LETTER_COLUMNS}""",
            (limit, hold_ms),
        )
        return sorted((DeadLetterRow(*row) for row in rows), key=lambda letter: letter.id)

    async def announced(self, ids: Sequence[int]) -> None:
        sql = f"UPDATE {self._schema}.dead SET announced_at = {self._now} WHERE id = ANY (%s::text::bigint[])"
        await self._runner.rows(f"{sql} RETURNING id", (number_array(ids),))
