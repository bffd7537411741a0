"""The queue on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
import psycopg

from tidebook.core.errors import InvalidInput
from tidebook.sql.port.queue import (
    UPCOMING_MAX,
    Claimed,
    Counts,
    Due,
    Failure,
    Flag,
    Held,
    NewEntry,
    Outcome,
    Put,
    QueueRef,
    QueueSettings,
    Step,
    Swept,
    Waiting,
    Wake,
)
from tidebook.sql.postgres.connect import make_pool
from tidebook.sql.postgres.failures import from_psycopg
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.postgres.queue_claims import Claim, Claims, Kind
from tidebook.sql.postgres.queue_declarations import Declarations
from tidebook.sql.postgres.queue_flags import Flags
from tidebook.sql.postgres.queue_floors import Floors
from tidebook.sql.postgres.queue_install import SHARED_TABLE, install, make_table, schema_name
from tidebook.sql.postgres.queue_keeping import Keeping
from tidebook.sql.postgres.queue_leases import Leases
from tidebook.sql.postgres.queue_marks import Marks
from tidebook.sql.postgres.queue_wakes import Wakes
from tidebook.sql.postgres.queue_within import put_within
from tidebook.sql.queries.queue import NOW
from tidebook.sql.queries.queue.arguments import (
    booleans,
    fail_parameters,
    numbers,
    put_parameters,
)
from tidebook.sql.queries.queue.statements import TableStatements, statements

CONNECTIONS_MAX = 4
#: How long opening waits for a server that does not answer: one that restarts is there by then.
OPEN_S_MAX = 15.0
# Plans that are made once, for tables whose statistics say nothing of what they hold a second later. What is told of is
# on the primary's disk, also where the server does not wait for it by itself.
_SESSION = (
    "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_bitmapscan=off -c synchronous_commit=local"
)
_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(QueueSettings).decode


class PostgresQueues:
    """All queues of one schema of a database. Open with `PostgresQueues.open`."""

    takes_transactions = True

    def __init__(self, url: str, *, schema: str, connections_max: int, now: str) -> None:
        self._url = url
        self._schema = schema_name(schema)
        self._now = now
        # One more than puts may take: while they wait for locks, leases are extended over it.
        self._pool = make_pool(url, size_max=connections_max + 1, application="tidebook queue", settings=_SESSION)
        self._calls = Calls(self._pool, puts_max=connections_max)
        self._tables: dict[str, TableStatements] = {}
        self._floors = Floors(self._calls)
        self._claims = Claims(self._calls, self._floors)
        self._leases = Leases(self._calls)
        self._flags = Flags(self._calls, self._schema, now)
        self._wakes = Wakes(url, self._calls, self._schema, now)
        self._keeping = Keeping(self._calls, self._schema)
        self._declarations = Declarations(self._calls, self._schema, now)
        self._marks = Marks(self._calls, self._schema, now)

    @classmethod
    async def open(
        cls, url: str, *, schema: str = "tidebook_queue", connections_max: int = CONNECTIONS_MAX, now: str = NOW
    ) -> PostgresQueues:
        """Connect, and install what is missing. `now` is the SQL for the database's time in milliseconds."""
        self = cls(url, schema=schema, connections_max=connections_max, now=now)
        try:
            await self._pool.open(wait=True, timeout=OPEN_S_MAX)
            async with self._calls.connection() as connection:
                await install(connection, schema=self._schema, now=now)
        except psycopg.Error as error:
            await self._pool.close()
            raise from_psycopg(error, writes=False) from error
        except BaseException:
            await self._pool.close()
            raise
        return self

    async def queue(self, name: str, settings: QueueSettings | None = None) -> QueueRef:
        """A queue by name, made where it is missing; settings that are given replace the ones that are kept."""
        found = await self._find(name)
        if found is None:
            async with self._calls.connection() as connection, connection.transaction():
                await connection.execute(f"LOCK TABLE {self._schema}.queue IN SHARE ROW EXCLUSIVE MODE")
                chosen = settings or QueueSettings()
                cursor = await connection.execute(
                    f"INSERT INTO {self._schema}.queue (name, table_name, settings) VALUES (%s, %s, %s)"
                    " ON CONFLICT (name) DO NOTHING RETURNING id",
                    (name, SHARED_TABLE, _encode(chosen)),
                )
                row = await cursor.fetchone()
                if row is not None and chosen.own_table:
                    table = f"{SHARED_TABLE}_of_{row[0]}"
                    await make_table(connection, table, schema=self._schema, now=self._now)
                    await connection.execute(
                        f"UPDATE {self._schema}.queue SET table_name = %s WHERE id = %s", (table, row[0])
                    )
            found = await self._find(name)
            assert found is not None, "it was made, or others made it"
        if settings is not None and found.settings != settings:
            if settings.own_table != found.settings.own_table:
                raise InvalidInput(f"queue {name!r}: own_table is settled when a queue is made; put into a new queue")
            await self._calls.rows(
                f"UPDATE {self._schema}.queue SET settings = %s WHERE id = %s RETURNING id",
                (_encode(settings), found.id),
            )
            found = msgspec.structs.replace(found, settings=settings)
        return found

    async def declare(self, queue: QueueRef, fields: bytes) -> QueueRef:
        """Bind a queue to a declaration of its fields. A changed one applies to a new table, which is begun for it."""
        number = await self._declarations.known(queue, fields)
        if number is None:
            if await self._declarations.any(queue):  # what was put by an older one stays in its table
                await self._keeping.begin(queue)
            # Only now: where no table could be begun, the next who declares it tries again.
            number = await self._declarations.add(queue, fields)
        return msgspec.structs.replace(queue, format=number)

    async def queues(self) -> list[QueueRef]:
        """All queues, by name."""
        rows = await self._calls.rows(
            f"SELECT id, name, settings, table_name FROM {self._schema}.queue ORDER BY name", (), writes=False
        )
        return [_ref(row) for row in rows]

    async def put(self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int) -> Put:
        """Add entries in one transaction; one whose key waits already is merged into the waiting one."""
        parameters = put_parameters(queue, entries, inserted_at)
        rows = await self._calls.put(self._of(queue).put, parameters, level=queue.settings.synchronous)
        now_ms, merged = rows[0]
        self._keeping.count(queue, merged)
        return Put(len(entries) - merged, merged, now_ms)

    async def put_once(
        self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int, source: str, steps: Sequence[Step]
    ) -> Put | None:
        """`put`, and in the same transaction the marks of a source move on; None where one has moved."""
        return await self._marks.put(queue, self._of(queue).put, entries, inserted_at, source, steps)

    async def marks(self, queue: QueueRef, source: str) -> dict[int, str]:
        """Where the parts of a source stand."""
        return await self._marks.all(queue, source)

    def put_within(
        self, transaction: object, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int
    ) -> Put | Awaitable[Put]:
        """`put` inside the caller's transaction; awaitable where the transaction's driver is."""
        parameters = put_parameters(queue, entries, inserted_at)
        return put_within(transaction, self._of(queue).put, parameters, queue.settings.synchronous, len(entries))

    async def claim(
        self, queue: QueueRef, *, limit: int, lease_ms: int, token: bytes, together: bool = True
    ) -> list[Claimed]:
        """Hand out due entries in order of priority, process date and age. Slow ones never come with others."""
        return await self._claims(Claim(Kind(self._of(queue), queue, lease_ms, together), limit, token))

    async def heartbeat(self, queue: QueueRef, held: Sequence[Held], *, lease_ms: int) -> dict[Held, int]:
        """Extend leases; the ones that are still held, with their new end."""
        return await self._leases.heartbeat(self._of(queue), queue, held, lease_ms)

    async def finish(self, queue: QueueRef, held: Sequence[Held]) -> set[Held]:
        """Delete entries; the ones that were still held. No keyhash occurs twice."""
        finished = await self._leases.finish(self._of(queue), queue, held)
        self._keeping.count(queue, len(finished))
        return finished

    async def fail(self, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
        """Return entries to wait, merge them into a waiting one of their key, or make dead letters of them."""
        rows = await self._calls.rows(
            self._of(queue).fail, fail_parameters(queue, failures), level=queue.settings.synchronous
        )
        outcomes: list[Outcome] = rows[0][0]
        self._keeping.count(queue, len(outcomes))
        return outcomes

    async def due(self, queues: Sequence[QueueRef]) -> list[Due]:
        """When something becomes due, queue by queue."""
        found: dict[int, Due] = {}
        for table, group in groupby(sorted(queues, key=_table), key=_table):
            refs = list(group)
            parameters = (
                numbers(ref.id for ref in refs),
                booleans(not ref.settings.parallel_keys for ref in refs),
            )
            rows = await self._calls.rows(self._of_table(table).due, parameters, writes=False)
            for ref, (now_ms, lease_end, ready, held, upcoming) in zip(refs, rows, strict=True):
                dates = tuple(sorted(upcoming)[:UPCOMING_MAX])
                found[ref.id] = Due(now_ms, lease_end, ready, held, dates)
        return [found[queue.id] for queue in queues]

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        """Tell putters that this process sleeps until a date, queue by queue."""
        await self._wakes.sleep(sleeper, until)

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        """It sleeps no more in these queues."""
        await self._wakes.awake(sleeper, queues)

    async def still_asleep(self, sleeper: bytes) -> None:
        """It is alive."""
        await self._wakes.still_asleep(sleeper)

    def wakes(self) -> AsyncIterator[Wake]:
        """What other processes put that is due before this one would wake."""
        return self._wakes.listen()

    async def sweep(self, queue: QueueRef) -> Swept:
        """Notice leases that ran out and entries that expired; begin and clear period tables."""
        rows = await self._calls.rows(self._of(queue).sweep, (queue.id, queue.settings.max_timeouts))
        expired, run_out, dead, next_at, now_ms = rows[0]
        self._keeping.count(queue, expired + run_out)
        if run_out:
            self._floors.forget(queue)
        period_end = await self._keeping.keep(queue, now_ms)
        await self._floors.look(queue, self._of(queue))
        return Swept(expired, run_out, dead, min(next_at, period_end), now_ms)

    async def entries(self, queue: QueueRef, *, limit: int) -> list[Waiting]:
        """The first entries in the order in which they would be handed out, those being processed first."""
        rows = await self._calls.rows(
            self._of(queue).entries, (queue.id, queue.id, limit, queue.id, limit), writes=False
        )
        return [Waiting(*row) for row in rows[:limit]]

    async def counts(self, queue: QueueRef) -> Counts:
        """A queue in numbers."""
        rows = await self._calls.rows(self._of(queue).counts, (queue.id, queue.id), writes=False)
        due, later, processing, oldest_due_ms, next_at = rows[0]
        dead = await self._flags.count(queue)
        return Counts(due, later, processing, dead, oldest_due_ms, next_at, await self._keeping.tables(queue))

    async def flags(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[Flag]:
        """Dead letters, newest first."""
        return await self._flags.all(queue, limit)

    async def retry(self, queue: QueueRef, flag: int) -> bool:
        """Put a dead letter back as a new entry; False where the queue has none of this number."""
        return await self._flags.retry(queue, flag, self._of(queue).put)

    async def edit(self, queue: QueueRef, flag: int, kind: int, data: bytes) -> bool:
        """Replace a dead letter's user data; False where the queue has none of this number."""
        return await self._flags.edit(queue, flag, kind, data)

    async def drop(self, queue: QueueRef, flag: int) -> bool:
        """Delete a dead letter; False where the queue has none of this number."""
        return await self._flags.drop(queue, flag)

    async def unannounced(self, *, limit: int = 100, hold_ms: int = 0) -> list[Flag]:
        """Dead letters that no hook has been told of yet; for `hold_ms` they are the caller's alone to tell of."""
        return await self._flags.unannounced(limit, hold_ms)

    async def announced(self, flags: Sequence[int]) -> None:
        """These were told."""
        await self._flags.announced(flags)

    async def close(self) -> None:
        """Finish what was begun, then let go."""
        await self._wakes.close()
        await self._pool.close()

    async def _find(self, name: str) -> QueueRef | None:
        rows = await self._calls.rows(
            f"SELECT id, name, settings, table_name FROM {self._schema}.queue WHERE name = %s", (name,), writes=False
        )
        return _ref(rows[0]) if rows else None

    def _of(self, queue: QueueRef) -> TableStatements:
        return self._of_table(queue.table)

    def _of_table(self, table: str) -> TableStatements:
        found = self._tables.get(table)
        if found is None:
            found = self._tables[table] = statements(self._schema, table, self._now)
        return found


def _ref(row: Iterable[Any]) -> QueueRef:
    id, name, settings, table = row
    return QueueRef(id, name, _decode(settings), table)


def _table(queue: QueueRef) -> str:
    return queue.table
