"""Record, remove and list the heartbeats of queue workers in PostgreSQL."""

from __future__ import annotations

from tidebook.queue.port import WORKER_FORGOTTEN_MS, QueueRef, WorkerReport, WorkerRow
from tidebook.queue.postgres.statement_runner import StatementRunner


class PostgresWorkers:
    """The methods of `PostgresQueues` that concern workers."""

    _runner: StatementRunner
    _schema: str
    _now: str

    async def report_worker(self, queue: QueueRef, report: WorkerReport) -> None:
        id, table = report.id.hex(), f"{self._schema}.worker"
        numbers = (report.concurrency, report.running, report.done, report.failed)
        await self._runner.rows(
            f"""WITH forgotten AS (DELETE FROM {table} WHERE queue = %s AND id <> %s::text::uuid
                AND reported_at < {self._now} - {WORKER_FORGOTTEN_MS})
            INSERT INTO {table} (queue, id, name, concurrency, running, done, failed, started_at, reported_at)
            VALUES (%s, %s::text::uuid, %s, %s, %s, %s, %s, {self._now}, {self._now})
            ON CONFLICT (queue, id) DO UPDATE SET name = excluded.name, concurrency = excluded.concurrency,
                running = excluded.running, done = excluded.done, failed = excluded.failed,
                reported_at = excluded.reported_at RETURNING queue""",
            (queue.id, id, queue.id, id, report.name, *numbers),
        )

    async def remove_worker(self, queue: QueueRef, id: bytes) -> None:
        sql = f"DELETE FROM {self._schema}.worker WHERE queue = %s AND id = %s::text::uuid RETURNING queue"
        await self._runner.rows(sql, (queue.id, id.hex()))

    async def workers(self, queue: QueueRef, *, limit: int = 100) -> list[WorkerRow]:
        rows = await self._runner.rows(
            f"""SELECT uuid_send(id), name, concurrency, running, done, failed, started_at, reported_at, {self._now}
            FROM {self._schema}.worker WHERE queue = %s ORDER BY reported_at DESC, id LIMIT %s""",
            (queue.id, limit),
            writes=False,
        )
        return [WorkerRow(*row) for row in rows]
