"""The queue store on PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, groupby, starmap
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import psycopg

from tidebook.core.errors import InvalidInput, TidebookError
from tidebook.postgres.connect import POOL_WAIT_S_MAX, Connection, connect_first, make_pool
from tidebook.postgres.errors import from_psycopg
from tidebook.queue import port
from tidebook.queue.postgres import statements
from tidebook.queue.postgres.browse import PostgresBrowser
from tidebook.queue.postgres.dead_letters import PostgresDeadLetters
from tidebook.queue.postgres.install import SHARED_TABLE, install, make_table, schema_name
from tidebook.queue.postgres.partitions import Partitions
from tidebook.queue.postgres.puts import PutCall, put_in_transaction
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.wakeups import PostgresWakeups

CONNECTIONS_MAX = 4
# Generic plans, because the statistics of these tables are outdated within a second. Reported changes are on the
# primary's disk, even if the server's default is asynchronous commit.
_SESSION_OPTIONS = (
    "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_bitmapscan=off -c synchronous_commit=local"
)
#: By id, then by date, then by priority: three stable sorts by a number are cheaper than one by a tuple.
_SORT_KEYS = (itemgetter(1), itemgetter(8), itemgetter(4))
_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(port.QueueSettings).decode


class PostgresQueues(PostgresBrowser, PostgresDeadLetters, PostgresWakeups):
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
        self._partitions = Partitions(self._runner, self._schema)
        self._sleepers = set()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        schema: str = "tidebook_queue",
        connections_max: int = CONNECTIONS_MAX,
        now: str = statements.NOW,
    ) -> PostgresQueues:
        """Connect, and install missing tables. `now` is the SQL for the database's time in milliseconds."""
        self = cls(url, schema=schema, connections_max=connections_max, now=now)
        try:
            async with await connect_first(url, application="tidebook queue", settings=_SESSION_OPTIONS) as connection:
                await install(connection, schema=self._schema, now=now)
            await self._pool.open(wait=True, timeout=POOL_WAIT_S_MAX)
        except BaseException as error:
            await self._pool.close()
            if isinstance(error, psycopg.Error):
                raise from_psycopg(error, writes=False) from error
            raise
        return self

    async def queue(self, name: str, settings: port.QueueSettings | None = None) -> port.QueueRef:
        found = await self._find(name)
        if found is None:
            async with self._runner.connection() as connection, connection.transaction():
                await self._create(connection, name, settings or port.QueueSettings())
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

    async def _create(self, connection: Connection, name: str, settings: port.QueueSettings) -> None:
        await connection.execute(f"LOCK TABLE {self._schema}.queue IN SHARE ROW EXCLUSIVE MODE")
        cursor = await connection.execute(
            f"INSERT INTO {self._schema}.queue (name, table_name, settings) VALUES (%s, %s, %s)"
            " ON CONFLICT (name) DO NOTHING RETURNING id",
            (name, SHARED_TABLE, _encode(settings)),
        )
        row = await cursor.fetchone()
        if row is not None and settings.own_table:
            table = f"{SHARED_TABLE}_of_{row[0]}"
            await make_table(connection, table, schema=self._schema, now=self._now)
            await connection.execute(f"UPDATE {self._schema}.queue SET table_name = %s WHERE id = %s", (table, row[0]))

    async def _find(self, name: str) -> port.QueueRef | None:
        sql = f"SELECT id, name, settings, table_name FROM {self._schema}.queue WHERE name = %s"
        rows = await self._runner.rows(sql, (name,), writes=False)
        return _ref(rows[0]) if rows else None

    async def queues(self) -> list[port.QueueRef]:
        sql = f"SELECT id, name, settings, table_name FROM {self._schema}.queue ORDER BY name"
        return [_ref(row) for row in await self._runner.rows(sql, (), writes=False)]

    async def declare(self, queue: port.QueueRef, fields: bytes) -> port.QueueRef:
        # An older declaration keeps its number, because a rolling upgrade uses both.
        table = f"{self._schema}.declaration"
        sql = f"SELECT max(format), max(format) FILTER (WHERE fields = %s) FROM {table} WHERE queue = %s"
        ((newest, number),) = await self._runner.rows(sql, (fields, queue.id), writes=False)
        if number is None:
            if newest is not None:  # entries of an older declaration stay in their partition
                await self._partitions.begin(queue)
            # Added last: if the rotation failed, the next process that declares the fields retries it.
            async with self._runner.connection() as connection, connection.transaction():
                await connection.execute(f"SELECT FROM {self._schema}.queue WHERE id = %s FOR UPDATE", (queue.id,))
                cursor = await connection.execute(sql, (fields, queue.id))
                found: Any = await cursor.fetchone()
                newest, number = found
                if number is None:
                    number = (newest or 0) + 1
                    await connection.execute(
                        f"INSERT INTO {table} (queue, format, fields, declared_at) VALUES (%s, %s, %s, {self._now})",
                        (queue.id, number, fields),
                    )
        return msgspec.structs.replace(queue, format=number)

    async def put(self, queue: port.QueueRef, entries: Sequence[port.NewEntry], *, inserted_at: int) -> port.Put:
        call = self._put_call(queue, entries, inserted_at)
        rows = await self._runner.put(call.sql, call.parameters, level=call.level)
        put = call.result(rows[0])
        self._partitions.count(queue, put.merged)
        return put

    def put_within(
        self, transaction: object, queue: port.QueueRef, entries: Sequence[port.NewEntry], *, inserted_at: int
    ) -> port.Put | Awaitable[port.Put]:
        return put_in_transaction(transaction, self._put_call(queue, entries, inserted_at))

    async def put_once(
        self,
        queue: port.QueueRef,
        entries: Sequence[port.NewEntry],
        *,
        inserted_at: int,
        source: str,
        steps: Sequence[port.Step],
    ) -> port.Put | None:
        call = self._put_call(queue, entries, inserted_at)
        done: port.Put | None = None
        async with self._runner.connection(puts=True) as connection, connection.transaction():
            await connection.execute(f"SET LOCAL synchronous_commit = {call.level}")
            for step in sorted(steps, key=attrgetter("part")):  # in one order, so that two transactions never deadlock
                if not await self._move_mark(connection, queue, source, step):
                    raise psycopg.Rollback
            if entries:
                cursor = await connection.execute(call.sql, call.parameters)
            else:
                cursor = await connection.execute(f"SELECT {self._now}, 0")
            done = call.result(await cursor.fetchone())
        return done

    async def _move_mark(self, connection: Connection, queue: port.QueueRef, source: str, step: port.Step) -> bool:
        key, mark = (queue.id, source, step.part), f"{self._schema}.mark"
        if step.before is None:
            sql = f"INSERT INTO {mark} VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"
            cursor = await connection.execute(sql, (*key, step.after))
        else:
            sql = f"UPDATE {mark} SET place = %s WHERE queue = %s AND source = %s AND part = %s AND place = %s"
            cursor = await connection.execute(sql, (step.after, *key, step.before))
        return cursor.rowcount == 1

    async def marks(self, queue: port.QueueRef, source: str) -> dict[int, str]:
        sql = f"SELECT part, place FROM {self._schema}.mark WHERE queue = %s AND source = %s"
        return dict(await self._runner.rows(sql, (queue.id, source), writes=False))

    async def claim(
        self, queue: port.QueueRef, limits: Mapping[bytes, int], *, lease_ms: int, together: bool = True
    ) -> list[port.Claimed]:
        settings = queue.settings
        *firsts, end = accumulate(limits.values(), initial=1)
        rows = await self._runner.rows(
            self._sql(statements.CLAIM, queue),
            (
                queue.id,
                end - 1,
                statements.number_array(firsts),
                statements.uuid_array(limits),
                lease_ms,
                settings.max_timeouts,
                not settings.parallel_keys,
                together,
            ),
            level=settings.synchronous,
        )
        for sort_key in _SORT_KEYS:
            rows.sort(key=sort_key)
        return list(starmap(port.Claimed, rows))  # starmap takes half the time of unpacking each row

    async def pause(self, queue: port.QueueRef) -> int:
        async with self._runner.connection() as connection, connection.transaction():
            # Claims hold this lock shared: those under way end first, and later ones find the queue paused.
            await connection.execute(
                f"SELECT pg_advisory_xact_lock('{self._schema}.queue'::regclass::oid::integer, %s)", (queue.id,)
            )
            cursor = await connection.execute(
                f"UPDATE {self._schema}.queue SET paused_at = coalesce(paused_at, {self._now}) WHERE id = %s"
                " RETURNING paused_at",
                (queue.id,),
            )
            found: Any = await cursor.fetchone()
        return int(found[0])

    async def resume(self, queue: port.QueueRef) -> bool:
        sql = f"""WITH resumed AS (UPDATE {self._schema}.queue SET paused_at = NULL
                WHERE id = %s AND paused_at IS NOT NULL RETURNING id)
            SELECT pg_notify('{self._schema}', id || ' ' || {self._now}) FROM resumed"""
        return bool(await self._runner.rows(sql, (queue.id,)))

    async def paused_at(self, queue: port.QueueRef) -> int | None:
        sql = f"SELECT paused_at FROM {self._schema}.queue WHERE id = %s"
        ((date_ms,),) = await self._runner.rows(sql, (queue.id,), writes=False)
        return None if date_ms is None else int(date_ms)

    async def report_worker(self, queue: port.QueueRef, report: port.WorkerReport) -> None:
        table = f"{self._schema}.worker"
        await self._runner.rows(
            f"""WITH forgotten AS (DELETE FROM {table} WHERE queue = %(queue)s AND id <> %(id)s::text::uuid
                AND reported_at < {self._now} - {port.WORKER_FORGOTTEN_MS})
            INSERT INTO {table} (queue, id, name, concurrency, running, done, failed, started_at, reported_at)
            VALUES (%(queue)s, %(id)s::text::uuid, %(name)s, %(concurrency)s, %(running)s, %(done)s, %(failed)s,
                {self._now}, {self._now})
            ON CONFLICT (queue, id) DO UPDATE SET name = excluded.name, concurrency = excluded.concurrency,
                running = excluded.running, done = excluded.done, failed = excluded.failed,
                reported_at = excluded.reported_at RETURNING queue""",
            msgspec.structs.asdict(report) | {"queue": queue.id, "id": report.id.hex()},
        )

    async def remove_worker(self, queue: port.QueueRef, id: bytes) -> None:
        sql = f"DELETE FROM {self._schema}.worker WHERE queue = %s AND id = %s::text::uuid RETURNING queue"
        await self._runner.rows(sql, (queue.id, id.hex()))

    async def heartbeat(
        self, queue: port.QueueRef, held: Sequence[port.LeasedEntry], *, lease_ms: int
    ) -> dict[port.LeasedEntry, int]:
        bundles, level = whole_bundles(held), queue.settings.synchronous
        extended: dict[port.LeasedEntry, int] = {}
        if bundles:
            sql = self._sql(statements.EXTEND_BUNDLES, queue)
            for token, until in await self._runner.rows(
                sql, (lease_ms, queue.id, statements.uuid_array(bundles)), level=level
            ):
                extended.update(dict.fromkeys(bundles[token], until))
        if missing := [entry for entry in held if entry not in extended]:
            sql = self._sql(statements.HEARTBEAT, queue)
            rows = await self._runner.rows(sql, (lease_ms, queue.id, *statements.held_parameters(missing)), level=level)
            ends = dict(rows)
            extended.update({entry: ends[entry.keyhash] for entry in missing if entry.keyhash in ends})
        return extended

    async def finish(self, queue: port.QueueRef, held: Sequence[port.LeasedEntry]) -> set[port.LeasedEntry]:
        bundles, level = whole_bundles(held), queue.settings.synchronous
        finished: set[port.LeasedEntry] = set()
        if bundles:
            sql = self._sql(statements.FINISH_BUNDLES, queue)
            for (token,) in await self._runner.rows(sql, (queue.id, statements.uuid_array(bundles)), level=level):
                finished.update(bundles[token])
        if len(finished) < len(held):  # single entries, parts of a bundle, or lost
            missing = [entry for entry in held if entry not in finished]
            parameters = (f"{queue.id}", queue.id, queue.id, *statements.held_parameters(missing))
            rows = await self._runner.rows(self._sql(statements.FINISH, queue), parameters, level=level)
            found = {row[0] for row in rows}
            finished.update(entry for entry in missing if entry.keyhash in found)
        self._partitions.count(queue, len(finished))
        return finished

    async def finish_and_claim(
        self, queue: port.QueueRef, claims: Sequence[port.FinishingClaim], *, lease_ms: int, together: bool = True
    ) -> tuple[Set[port.LeasedEntry], list[port.Claimed]]:
        finished: set[port.LeasedEntry] = set()
        for held in port.split_by_key([each for one in claims for each in one.finished]):
            finished |= await self.finish(queue, held)
        limits = port.limits_without_loss(claims, finished)
        try:
            claimed = await self.claim(queue, limits, lease_ms=lease_ms, together=together) if limits else []
        except TidebookError:  # an error would say that nothing was finished
            claimed = []
        return finished, claimed

    async def fail(self, queue: port.QueueRef, failures: Sequence[port.Failure]) -> list[port.Outcome]:
        ((outcomes,),) = await self._runner.rows(
            self._sql(statements.FAIL, queue),
            statements.fail_parameters(queue, failures),
            level=queue.settings.synchronous,
        )
        self._partitions.count(queue, len(outcomes))
        return outcomes  # type: ignore[no-any-return]

    async def due(self, queues: Sequence[port.QueueRef]) -> list[port.Due]:
        found: dict[int, port.Due] = {}
        for _, group in groupby(sorted(queues, key=attrgetter("table")), key=attrgetter("table")):
            refs = list(group)
            parameters = (
                statements.number_array(ref.id for ref in refs),
                statements.number_array(not ref.settings.parallel_keys for ref in refs),
            )
            rows = await self._runner.rows(self._sql(statements.DUE, refs[0]), parameters, writes=False)
            for ref, (now_ms, lease_end, ready, held, upcoming, paused) in zip(refs, rows, strict=True):
                dates = tuple(sorted(upcoming)[: port.UPCOMING_MAX])
                found[ref.id] = port.Due(now_ms, lease_end, ready, held, dates, paused)
        return [found[queue.id] for queue in queues]

    async def sweep(self, queue: port.QueueRef) -> port.MaintenanceResult:
        sql = self._sql(statements.SWEEP, queue)
        ((expired, leases_expired, dead, next_at, now_ms),) = await self._runner.rows(
            sql, (queue.id, queue.settings.max_timeouts)
        )
        self._partitions.count(queue, expired + leases_expired)
        period_end = await self._partitions.rotate_and_clear(queue, now_ms)
        return port.MaintenanceResult(expired, leases_expired, dead, min(next_at, period_end), now_ms)

    async def entries(self, queue: port.QueueRef, *, limit: int) -> list[port.WaitingEntry]:
        parameters = (queue.id, queue.id, limit, queue.id, limit)
        rows = await self._runner.rows(self._sql(statements.ENTRIES, queue), parameters, writes=False)
        return [port.WaitingEntry(*row) for row in rows[:limit]]

    async def counts(self, queue: port.QueueRef) -> port.Counts:
        parameters = (queue.id, queue.table, queue.id, queue.id, queue.id)
        (row,) = await self._runner.rows(self._sql(statements.COUNTS, queue), parameters, writes=False)
        return port.Counts(*row)

    async def close(self) -> None:
        """Withdraw the published sleep, then close the pool."""
        await self._withdraw_sleep()
        await self._pool.close()

    def _sql(self, text: str, queue: port.QueueRef) -> str:
        return statements.statement(text, self._schema, queue.table, self._now)

    def _put_call(self, queue: port.QueueRef, entries: Sequence[port.NewEntry], inserted_at: int) -> PutCall:
        parameters = statements.put_parameters(queue, entries, inserted_at)
        return PutCall(self._sql(statements.PUT, queue), parameters, queue.settings.synchronous, len(entries))


def whole_bundles(held: Sequence[port.LeasedEntry]) -> dict[bytes, list[port.LeasedEntry]]:
    """Return, by token, the entries of the bundles whose entries are all given."""
    bundles: dict[bytes, list[port.LeasedEntry]] = {}
    for entry in held:
        if entry.together:
            bundles.setdefault(entry.token, []).append(entry)
    # an entry that is given twice does not replace another
    return {
        token: group
        for token, group in bundles.items()
        if len(group) == group[0].together == len({entry.keyhash for entry in group})
    }


def _ref(row: Iterable[Any]) -> port.QueueRef:
    id, name, settings, table = row
    return port.QueueRef(id, name, _decode(settings), table)
