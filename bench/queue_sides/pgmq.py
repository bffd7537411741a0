"""The peer pgmq: SQL functions of a queue with visibility timeouts.

pgmq is a server extension, which a plain PostgreSQL does not have: `send_batch`, `read` and `delete` follow its
documented behaviour (dynamic SQL over one table per queue, an index on the visibility date, jsonb messages).
"""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg

from bench.queue_sides.side import BATCH, PAYLOAD

_MESSAGE = '{"data": "' + PAYLOAD.decode() + '"}'
_SCHEMA = """
DROP SCHEMA IF EXISTS bench_pgmq CASCADE;
CREATE SCHEMA bench_pgmq;
CREATE TABLE bench_pgmq.q_bench (
    msg_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    read_ct integer NOT NULL DEFAULT 0,
    enqueued_at timestamptz NOT NULL DEFAULT now(),
    vt timestamptz NOT NULL,
    message jsonb,
    headers jsonb
);
CREATE INDEX q_bench_vt_idx ON bench_pgmq.q_bench (vt ASC);

CREATE FUNCTION bench_pgmq.send_batch(queue_name text, msgs jsonb[], delay integer) RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY EXECUTE format(
        'INSERT INTO bench_pgmq.%I (vt, message) SELECT $2, unnest($1) RETURNING msg_id', 'q_' || queue_name)
    USING msgs, clock_timestamp() + make_interval(secs => delay);
END $$;

CREATE FUNCTION bench_pgmq.read(queue_name text, vt integer, qty integer)
RETURNS TABLE (msg_id bigint, read_ct integer, enqueued_at timestamptz, vt_at timestamptz, message jsonb)
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY EXECUTE format(
        'WITH cte AS (
            SELECT msg_id FROM bench_pgmq.%I WHERE vt <= clock_timestamp() ORDER BY msg_id ASC LIMIT $1
            FOR UPDATE SKIP LOCKED)
        UPDATE bench_pgmq.%I m SET vt = clock_timestamp() + $2, read_ct = read_ct + 1 FROM cte
        WHERE m.msg_id = cte.msg_id RETURNING m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message',
        'q_' || queue_name, 'q_' || queue_name)
    USING qty, make_interval(secs => vt);
END $$;

CREATE FUNCTION bench_pgmq.delete(queue_name text, msg_ids bigint[]) RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY EXECUTE format(
        'DELETE FROM bench_pgmq.%I WHERE msg_id = ANY ($1) RETURNING msg_id', 'q_' || queue_name)
    USING msg_ids;
END $$;
"""


class Pgmq:
    """Reads 100 messages at a time and deletes those that were read."""

    name = "pgmq"

    def __init__(self, url: str) -> None:
        self._url = url

    async def open(self) -> None:
        async with await self._connect() as connection:
            await connection.execute(_SCHEMA, prepare=False)

    async def put(self, count: int, *, tasks: int) -> None:
        async def some(batches: int) -> None:
            async with await self._connect() as connection:
                for _ in range(batches):
                    await connection.execute(
                        "SELECT bench_pgmq.send_batch('bench', %s::jsonb[], 0)", ([_MESSAGE] * BATCH,)
                    )

        await asyncio.gather(*(some(count // BATCH // tasks) for _ in range(tasks)))

    async def drain(self, *, connections: int) -> int:
        return sum(await asyncio.gather(*(self._work(BATCH) for _ in range(connections))))

    async def singles(self, *, workers: int) -> int:
        return sum(await asyncio.gather(*(self._work(1) for _ in range(workers))))

    async def close(self) -> None:
        async with await self._connect() as connection:
            await connection.execute("DROP SCHEMA IF EXISTS bench_pgmq CASCADE")

    async def _work(self, batch: int) -> int:
        done = 0
        async with await self._connect() as connection:
            cursor = connection.cursor(binary=True)
            while True:
                await cursor.execute("SELECT * FROM bench_pgmq.read('bench', 60, %s)", (batch,))
                rows = await cursor.fetchall()
                if not rows:
                    return done
                await cursor.execute("SELECT bench_pgmq.delete('bench', %s)", ([row[0] for row in rows],))
                done += len(await cursor.fetchall())

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(self._url, autocommit=True, prepare_threshold=1)
