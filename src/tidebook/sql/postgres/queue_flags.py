"""Dead letters on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import psycopg

from tidebook.core.errors import Unavailable
from tidebook.sql.port.queue import NEVER_MS, Flag, NewEntry, QueueRef
from tidebook.sql.postgres.connect import Connection
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.queries.queue.arguments import numbers, put_parameters
from tidebook.sql.queries.queue.statements import FLAG_COLUMNS

#: How often a letter is put back anew because an entry of its key came to wait at the same time.
RETRIES_MAX = 10


class Flags:
    """The table of dead letters; each row is a flag that was raised."""

    def __init__(self, calls: Calls, schema: str, now: str) -> None:
        self._calls = calls
        self._schema = schema
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
        """Put a dead letter back: it waits from now on, with the data of a newer entry of its key, if there is one."""
        async with self._calls.connection(puts=True) as connection, connection.transaction():
            await connection.execute(f"SET LOCAL synchronous_commit = {queue.settings.synchronous}")
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
            if expires_at <= now_ms:  # it would never be handed out
                expires_at = NEVER_MS
            entry = NewEntry(keyhash, kind, data, key, priority, None, expires_at)
            for _ in range(RETRIES_MAX):
                if key is not None and await self._join(connection, queue, entry, inserted_at):
                    return True
                if await self._put_back(connection, queue, entry, inserted_at, number, put):
                    return True
            raise Unavailable(f"queue {queue.name!r}: {key} is put and taken all the time: try again later")

    async def _join(self, connection: Connection, queue: QueueRef, letter: NewEntry, inserted_at: int) -> bool:
        """Merge a letter into the waiting entry of its key, whose data was put later, and stays.

        One whose lease ran out, which was counted, is waiting too; who held it holds it no more.
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

    async def _put_back(
        self, connection: Connection, queue: QueueRef, letter: NewEntry, inserted_at: int, number: int, put: str
    ) -> bool:
        """Put a letter, beside the one that is being processed with that one's data; False: one waits by now."""
        done = False
        async with connection.transaction():
            if letter.key is not None:
                cursor = await connection.execute(
                    f"SELECT kind, data, format FROM {self._schema}.{queue.table} WHERE queue = %s AND status = 'P'"
                    " AND keyhash = %s::text::uuid ORDER BY id DESC LIMIT 1",
                    (queue.id, letter.keyhash.hex()),
                    binary=True,
                )
                held = await cursor.fetchone()
                if held is not None:
                    kind, data, number = held
                    letter = msgspec.structs.replace(letter, kind=kind, data=data)
            ref = msgspec.structs.replace(queue, format=number)
            cursor = await connection.execute(put, put_parameters(ref, [letter], inserted_at))
            row = await cursor.fetchone()
            done = row is not None and bool(row[1] == 0)
            if not done:
                raise psycopg.Rollback
        return done

    async def edit(self, queue: QueueRef, flag: int, kind: int, data: bytes) -> bool:
        """Replace the user data, which was checked against the declaration that is in force now."""
        rows = await self._calls.rows(
            f"UPDATE {self._dead} SET kind = %s, data = %s, format = %s WHERE id = %s AND queue = %s RETURNING id",
            (kind, data, queue.format, flag, queue.id),
            level=queue.settings.synchronous,
        )
        return bool(rows)

    async def drop(self, queue: QueueRef, flag: int) -> bool:
        """Delete it."""
        sql = f"DELETE FROM {self._dead} WHERE id = %s AND queue = %s RETURNING id"
        return bool(await self._calls.rows(sql, (flag, queue.id), level=queue.settings.synchronous))

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
