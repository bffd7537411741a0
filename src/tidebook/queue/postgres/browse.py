"""Bounded listings of entries and dead letters on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidebook.queue.browse import EntryPlace
from tidebook.queue.port import QueueRef
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.statements import ENTRY_COLUMNS, LETTER_COLUMNS, PART_COLUMNS, number_array, statement
from tidebook.queue.sql_browser import BrowseStatements, SqlBrowser

_COLUMNS = f"{ENTRY_COLUMNS}, uuid_send(token)"
_RANGE = """FROM {t} WHERE queue = %(queue)s AND status = 'W' AND priority = %(priority)s
    AND process_at BETWEEN %(low)s AND %(high)s AND (process_at, id) > (%(date)s, %(id)s) AND expires_at > %(now)s"""
_HELD = f"""(SELECT {_COLUMNS} FROM {{t}} WHERE queue = %(queue)s AND status = 'P' AND lease_until >= %(date)s
    AND together IS NULL UNION ALL SELECT {PART_COLUMNS}, uuid_send(b.token) FROM {{t}} b, unnest(b.parts) AS p
    WHERE b.queue = %(queue)s AND b.status = 'P' AND b.lease_until >= %(date)s AND b.together IS NOT NULL) AS held"""
_HELD_PAGE = f"""SELECT * FROM {_HELD} WHERE (lease_until, id) > (%(date)s, %(id)s)
    ORDER BY lease_until, id LIMIT %(limit)s"""
_LETTERS = "FROM {s}.dead d JOIN {s}.queue q ON q.id = d.queue WHERE d.queue = %(queue)s"
_MATCHING = """d.id < %(below)s AND d.id >= %(floor)s AND (%(key)s::text IS NULL OR d.key = %(key)s::text)
    AND position(%(reason)s in d.reason) > 0 ORDER BY d.id DESC"""
_REMOVE = """WITH gone AS (DELETE FROM {t} e
        USING unnest(%s::text::smallint[], %s::text::bigint[], %s::text::bigint[]) AS p (priority, process_at, id)
        WHERE e.queue = %s AND e.status = 'W' AND e.priority = p.priority AND e.process_at = p.process_at
        AND e.id = p.id RETURNING 1)
    SELECT count(*) FROM gone"""


class PostgresBrowser(SqlBrowser):
    """The methods of the store that list entries page by page, and remove them."""

    _runner: StatementRunner
    _schema: str
    _now: str
    _statements = BrowseStatements(
        next_priority="""SELECT priority FROM {t} WHERE queue = %(queue)s AND status = 'W' AND priority >= %(least)s
            ORDER BY priority LIMIT 1""",
        range=f"SELECT {_COLUMNS} {_RANGE} ORDER BY process_at, id LIMIT %(limit)s",
        range_count=f"SELECT count(*) FROM (SELECT 1 {_RANGE} LIMIT %(limit)s) AS bounded",
        waiting_of_key=f"""SELECT {_COLUMNS} FROM {{t}} WHERE queue = %(queue)s AND status = 'W'
            AND keyhash = %(keyhash)s::text::uuid AND expires_at > %(now)s""",
        held=_HELD_PAGE,
        held_of_key=_HELD_PAGE,  # a bundle has no index by the keys inside
        held_count=f"SELECT count(*) FROM (SELECT 1 FROM {_HELD} LIMIT %(limit)s) AS bounded",
        claims="""SELECT uuid_send(token), sum(coalesce(together, 1))::bigint, min(started_at), min(lease_until) FROM (
                SELECT token, together, started_at, lease_until FROM {t}
                WHERE queue = %(queue)s AND status = 'P' AND lease_until IS NOT NULL AND token IS NOT NULL
                ORDER BY lease_until LIMIT %(searched)s) AS held
            GROUP BY token ORDER BY min(lease_until) LIMIT %(limit)s""",
        workers="""SELECT uuid_send(id), name, concurrency, running, done, failed, started_at, reported_at, {now}
            FROM {s}.worker WHERE queue = %(queue)s ORDER BY reported_at DESC, id LIMIT %(limit)s""",
        letters=f"SELECT {LETTER_COLUMNS} {_LETTERS} AND {_MATCHING} LIMIT %(limit)s",
        letter_ids=f"SELECT d.id FROM {{s}}.dead d WHERE d.queue = %(queue)s AND {_MATCHING}",
        letter_floor="""SELECT id FROM {s}.dead WHERE queue = %(queue)s AND id < %(below)s
            ORDER BY id DESC LIMIT 1 OFFSET %(searched)s""",
        letter=f"SELECT {LETTER_COLUMNS} {_LETTERS} AND d.id = %(id)s",
        letter_count="SELECT count(*) FROM (SELECT 1 FROM {s}.dead WHERE queue = %(queue)s LIMIT %(limit)s) AS bounded",
    )

    async def _select(self, sql: str, queue: QueueRef, **parameters: object) -> list[Any]:
        text = statement(sql, self._schema, queue.table, self._now)
        return await self._runner.rows(text, {"queue": queue.id, **parameters}, writes=False)

    async def _time_ms(self) -> int:
        ((now_ms,),) = await self._runner.rows(f"SELECT {self._now}", (), writes=False)
        return int(now_ms)

    async def remove(self, queue: QueueRef, places: Sequence[EntryPlace]) -> int:
        columns = [number_array(column) for column in zip(*places, strict=True)]
        if not columns:
            return 0
        text = statement(_REMOVE, self._schema, queue.table, self._now)
        ((count,),) = await self._runner.rows(text, (*columns, queue.id), level=queue.settings.synchronous)
        return int(count)
