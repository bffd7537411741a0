"""The queue store on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
import psycopg

from tidebook.core.errors import InvalidInput
from tidebook.postgres.connect import POOL_WAIT_S_MAX, connect_first, make_pool
from tidebook.postgres.errors import from_psycopg
from tidebook.queue.port import (
    UPCOMING_MAX,
    Claimed,
    Counts,
    DeadLetterRow,
    Due,
    Failure,
    LeasedEntry,
    MaintenanceResult,
    NewEntry,
    Outcome,
    Put,
    QueueRef,
    QueueSettings,
    Step,
    WaitingEntry,
    WakeRequest,
)
from tidebook.queue.postgres.arguments import (
    boolean_array,
    fail_parameters,
    number_array,
    put_parameters,
)
from tidebook.queue.postgres.claim_watermarks import ClaimWatermarks
from tidebook.queue.postgres.claims import ClaimKind, PostgresClaim, PostgresClaims
from tidebook.queue.postgres.dead_letters import PostgresDeadLetters
from tidebook.queue.postgres.declarations import Declarations
from tidebook.queue.postgres.feed_marks import PostgresFeedMarks
from tidebook.queue.postgres.install import SHARED_TABLE, install, make_table, schema_name
from tidebook.queue.postgres.leases import Leases
from tidebook.queue.postgres.maintenance import PartitionMaintenance
from tidebook.queue.postgres.notify import QueueNotify
from tidebook.queue.postgres.put_in_transaction import put_in_transaction
from tidebook.queue.postgres.sql import NOW
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.statements import TableStatements, statements

CONNECTIONS_MAX = 4
# Generic plans, because the statistics of these tables are outdated within a second. What a call has reported is on the
# primary's disk, even if the server's default is asynchronous commit.
_SESSION_OPTIONS = (
    "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_bitmapscan=off -c synchronous_commit=local"
)
_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(QueueSettings).decode


class PostgresQueues:
    """All queues of one schema of a database. Open it with `PostgresQueues.open`."""

    takes_transactions = True

    def __init__(self, url: str, *, schema: str, connections_max: int, now: str) -> None:
        self._url = url
        self._schema = schema_name(schema)
        self._now = now
        # One connection more than puts may use: leases are extended on it while puts wait for locks.
        self._pool = make_pool(
            url, size_max=connections_max + 1, application="tidebook queue", settings=_SESSION_OPTIONS
        )
        self._runner = StatementRunner(self._pool, puts_max=connections_max)
        self._tables: dict[str, TableStatements] = {}
        self._watermarks = ClaimWatermarks(self._runner)
        self._claims = PostgresClaims(self._runner, self._watermarks)
        self._leases = Leases(self._runner)
        self._dead_letters = PostgresDeadLetters(self._runner, self._schema, now)
        self._notify = QueueNotify(url, self._runner, self._schema, now)
        self._partitions = PartitionMaintenance(self._runner, self._schema)
        self._declarations = Declarations(self._runner, self._schema, now)
        self._marks = PostgresFeedMarks(self._runner, self._schema, now)

    @classmethod
    async def open(
        cls, url: str, *, schema: str = "tidebook_queue", connections_max: int = CONNECTIONS_MAX, now: str = NOW
    ) -> PostgresQueues:
        """Connect, and install what is missing. `now` is the SQL for the database's time in milliseconds."""
        self = cls(url, schema=schema, connections_max=connections_max, now=now)
        try:
            async with await connect_first(url, application="tidebook queue", settings=_SESSION_OPTIONS) as connection:
                await install(connection, schema=self._schema, now=now)
            await self._pool.open(wait=True, timeout=POOL_WAIT_S_MAX)
        except psycopg.Error as error:
            await self._pool.close()
            raise from_psycopg(error, writes=False) from error
        except BaseException:
            await self._pool.close()
            raise
        return self

    async def queue(self, name: str, settings: QueueSettings | None = None) -> QueueRef:
        """Return a queue by name, created if it is missing; `settings`, if given, replace the stored ones."""
        found = await self._find(name)
        if found is None:
            async with self._runner.connection() as connection, connection.transaction():
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
            assert found is not None, "this process or another has created it"
        if settings is not None and found.settings != settings:
            if settings.own_table != found.settings.own_table:
                raise InvalidInput(f"queue {name!r}: own_table is fixed when a queue is created: use a new queue")
            await self._runner.rows(
                f"UPDATE {self._schema}.queue SET settings = %s WHERE id = %s RETURNING id",
                (_encode(settings), found.id),
            )
            found = msgspec.structs.replace(found, settings=settings)
        return found

    async def declare(self, queue: QueueRef, fields: bytes) -> QueueRef:
        """Bind a queue to a declaration of its fields; entries under a changed declaration go to a new partition."""
        number = await self._declarations.number_of(queue, fields)
        if number is None:
            if await self._declarations.any(queue):  # entries of an older declaration stay in their partition
                await self._partitions.begin(queue)
            # Added last: if the rotation failed, the next process that declares the fields retries it.
            number = await self._declarations.add(queue, fields)
        return msgspec.structs.replace(queue, format=number)

    async def queues(self) -> list[QueueRef]:
        """Return all queues, by name."""
        rows = await self._runner.rows(
            f"SELECT id, name, settings, table_name FROM {self._schema}.queue ORDER BY name", (), writes=False
        )
        return [_ref(row) for row in rows]

    async def put(self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int) -> Put:
        """Add entries in one transaction; merge an entry whose key is already waiting into the waiting one."""
        parameters = put_parameters(queue, entries, inserted_at)
        rows = await self._runner.put(self._statements(queue).put, parameters, level=queue.settings.synchronous)
        now_ms, merged = rows[0]
        self._partitions.count(queue, merged)
        return Put(len(entries) - merged, merged, now_ms)

    async def put_once(
        self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int, source: str, steps: Sequence[Step]
    ) -> Put | None:
        """Put, and move the marks of a source in the same transaction; return None if a mark has moved."""
        return await self._marks.put(queue, self._statements(queue).put, entries, inserted_at, source, steps)

    async def marks(self, queue: QueueRef, source: str) -> dict[int, str]:
        """Return the mark of each part of a source."""
        return await self._marks.all(queue, source)

    def put_within(
        self, transaction: object, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int
    ) -> Put | Awaitable[Put]:
        """Put inside the caller's transaction; return an awaitable if the transaction's driver is async."""
        parameters = put_parameters(queue, entries, inserted_at)
        return put_in_transaction(
            transaction, self._statements(queue).put, parameters, queue.settings.synchronous, len(entries)
        )

    async def claim(
        self, queue: QueueRef, *, limit: int, lease_ms: int, token: bytes, together: bool = True
    ) -> list[Claimed]:
        """Claim due entries in order of priority, process date and age; slow entries are never claimed with others."""
        return await self._claims(
            PostgresClaim(ClaimKind(self._statements(queue), queue, lease_ms, together), limit, token)
        )

    async def heartbeat(self, queue: QueueRef, held: Sequence[LeasedEntry], *, lease_ms: int) -> dict[LeasedEntry, int]:
        """Extend leases; return the entries that are still held, with the new end of their lease."""
        return await self._leases.heartbeat(self._statements(queue), queue, held, lease_ms)

    async def finish(self, queue: QueueRef, held: Sequence[LeasedEntry]) -> set[LeasedEntry]:
        """Delete finished entries; return those that were still held. No keyhash occurs twice."""
        finished = await self._leases.finish(self._statements(queue), queue, held)
        self._partitions.count(queue, len(finished))
        return finished

    async def fail(self, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
        """Return entries to the queue, merge them into a waiting one of their key, or make dead letters of them."""
        rows = await self._runner.rows(
            self._statements(queue).fail, fail_parameters(queue, failures), level=queue.settings.synchronous
        )
        outcomes: list[Outcome] = rows[0][0]
        self._partitions.count(queue, len(outcomes))
        return outcomes

    async def due(self, queues: Sequence[QueueRef]) -> list[Due]:
        """Return, for each queue, when it next has work."""
        found: dict[int, Due] = {}
        for table, group in groupby(sorted(queues, key=_table_of), key=_table_of):
            refs = list(group)
            parameters = (
                number_array(ref.id for ref in refs),
                boolean_array(not ref.settings.parallel_keys for ref in refs),
            )
            rows = await self._runner.rows(self._table_statements(table).due, parameters, writes=False)
            for ref, (now_ms, lease_end, ready, held, upcoming) in zip(refs, rows, strict=True):
                dates = tuple(sorted(upcoming)[:UPCOMING_MAX])
                found[ref.id] = Due(now_ms, lease_end, ready, held, dates)
        return [found[queue.id] for queue in queues]

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        """Publish until when this process sleeps in each queue."""
        await self._notify.sleep(sleeper, until)

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        """Withdraw the sleep of these queues."""
        await self._notify.awake(sleeper, queues)

    async def still_asleep(self, sleeper: bytes) -> None:
        """Refresh the published sleep."""
        await self._notify.still_asleep(sleeper)

    def wakes(self) -> AsyncIterator[WakeRequest]:
        """Yield the puts of other processes that are due before this process would wake."""
        return self._notify.listen()

    async def sweep(self, queue: QueueRef) -> MaintenanceResult:
        """Expire leases and entries; rotate and clear partitions; read new claim watermarks."""
        rows = await self._runner.rows(self._statements(queue).sweep, (queue.id, queue.settings.max_timeouts))
        expired, run_out, dead, next_at, now_ms = rows[0]
        self._partitions.count(queue, expired + run_out)
        if run_out:
            self._watermarks.reset(queue)
        period_end = await self._partitions.rotate_and_clear(queue, now_ms)
        await self._watermarks.refresh(queue, self._statements(queue))
        return MaintenanceResult(expired, run_out, dead, min(next_at, period_end), now_ms)

    async def entries(self, queue: QueueRef, *, limit: int) -> list[WaitingEntry]:
        """Return the first entries in claim order, those being processed first."""
        rows = await self._runner.rows(
            self._statements(queue).entries, (queue.id, queue.id, limit, queue.id, limit), writes=False
        )
        return [WaitingEntry(*row) for row in rows[:limit]]

    async def counts(self, queue: QueueRef) -> Counts:
        """Return the number of entries, by state."""
        rows = await self._runner.rows(self._statements(queue).counts, (queue.id, queue.id), writes=False)
        due, later, processing, oldest_due_ms, next_at = rows[0]
        dead = await self._dead_letters.count(queue)
        return Counts(due, later, processing, dead, oldest_due_ms, next_at, await self._partitions.tables(queue))

    async def flags(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[DeadLetterRow]:
        """Return dead letters, newest first."""
        return await self._dead_letters.all(queue, limit)

    async def retry(self, queue: QueueRef, flag: int) -> bool:
        """Put a dead letter back as a new entry; return False if the queue has no dead letter of this id."""
        return await self._dead_letters.retry(queue, flag, self._statements(queue).put)

    async def edit(self, queue: QueueRef, flag: int, kind: int, data: bytes) -> bool:
        """Replace a dead letter's user data; return False if the queue has no dead letter of this id."""
        return await self._dead_letters.edit(queue, flag, kind, data)

    async def drop(self, queue: QueueRef, flag: int) -> bool:
        """Delete a dead letter; return False if the queue has no dead letter of this id."""
        return await self._dead_letters.drop(queue, flag)

    async def unannounced(self, *, limit: int = 100, hold_ms: int = 0) -> list[DeadLetterRow]:
        """Return dead letters that no hook has reported yet, and reserve them for the caller for `hold_ms`."""
        return await self._dead_letters.unannounced(limit, hold_ms)

    async def announced(self, flags: Sequence[int]) -> None:
        """Mark dead letters as reported."""
        await self._dead_letters.announced(flags)

    async def close(self) -> None:
        """Withdraw the published sleep, then close the pool."""
        await self._notify.close()
        await self._pool.close()

    async def _find(self, name: str) -> QueueRef | None:
        rows = await self._runner.rows(
            f"SELECT id, name, settings, table_name FROM {self._schema}.queue WHERE name = %s", (name,), writes=False
        )
        return _ref(rows[0]) if rows else None

    def _statements(self, queue: QueueRef) -> TableStatements:
        return self._table_statements(queue.table)

    def _table_statements(self, table: str) -> TableStatements:
        found = self._tables.get(table)
        if found is None:
            found = self._tables[table] = statements(self._schema, table, self._now)
        return found


def _ref(row: Iterable[Any]) -> QueueRef:
    id, name, settings, table = row
    return QueueRef(id, name, _decode(settings), table)


def _table_of(queue: QueueRef) -> str:
    return queue.table
