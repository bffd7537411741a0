"""Bounded listings of entries and dead letters on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from tidebook.queue.browse import (
    LETTERS_SCANNED_MAX,
    BrowsedEntry,
    ClaimSummary,
    EntryFilter,
    EntryPlace,
    LetterFilter,
    LetterPage,
)
from tidebook.queue.port import DeadLetterRow, QueueRef, WaitingEntry
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.statements import ENTRY_COLUMNS, LETTER_COLUMNS, PART_COLUMNS, number_array, statement

_COLUMNS = f"{ENTRY_COLUMNS}, uuid_send(token)"
_PART_COLUMNS = f"{PART_COLUMNS}, uuid_send(b.token)"
_NEXT_PRIORITY = """SELECT priority, {now} FROM {t} WHERE queue = %s AND status = 'W' AND priority >= %s
    ORDER BY priority LIMIT 1"""
_NOW = "SELECT {now}"
_RANGE = """FROM {t} WHERE queue = %s AND status = 'W' AND priority = %s AND process_at BETWEEN %s AND %s
    AND (process_at, id) > (%s, %s) AND expires_at > %s"""
_WAITING = f"SELECT {_COLUMNS} {_RANGE} ORDER BY process_at, id LIMIT %s"
_WAITING_COUNT = f"SELECT count(*) FROM (SELECT 1 {_RANGE} LIMIT %s) AS bounded"
_WAITING_KEY = f"""SELECT {_COLUMNS} FROM {{t}} WHERE queue = %s AND status = 'W' AND keyhash = %s::text::uuid
    AND expires_at > %s"""
_ALL_HELD = f"""(SELECT {_COLUMNS} FROM {{t}} WHERE queue = %s AND status = 'P' AND lease_until >= %s
    AND together IS NULL UNION ALL SELECT {_PART_COLUMNS} FROM {{t}} b, unnest(b.parts) AS p WHERE b.queue = %s
    AND b.status = 'P' AND b.lease_until >= %s AND b.together IS NOT NULL) AS held"""
_HELD = f"SELECT * FROM {_ALL_HELD} WHERE (lease_until, id) > (%s, %s) ORDER BY lease_until, id LIMIT %s"
_HELD_COUNT = f"SELECT count(*) FROM (SELECT 1 FROM {_ALL_HELD} LIMIT %s) AS bounded"
_CLAIMS = """SELECT uuid_send(token), sum(coalesce(together, 1))::bigint, min(started_at), min(lease_until) FROM (
        SELECT token, together, started_at, lease_until FROM {t}
        WHERE queue = %s AND status = 'P' AND lease_until IS NOT NULL AND token IS NOT NULL
        ORDER BY lease_until LIMIT %s) AS held
    GROUP BY token ORDER BY min(lease_until) LIMIT %s"""
_REMOVE = """WITH gone AS (DELETE FROM {t} e
        USING unnest(%s::text::smallint[], %s::text::bigint[], %s::text::bigint[]) AS p (priority, process_at, id)
        WHERE e.queue = %s AND e.status = 'W' AND e.priority = p.priority AND e.process_at = p.process_at
        AND e.id = p.id RETURNING 1)
    SELECT count(*) FROM gone"""
_LETTERS = f"""SELECT {LETTER_COLUMNS} FROM {{s}}.dead d JOIN {{s}}.queue q ON q.id = d.queue
    WHERE d.queue = %s AND d.id < %s AND d.id >= %s AND (%s::text IS NULL OR d.key = %s::text)
    AND position(%s in d.reason) > 0 ORDER BY d.id DESC LIMIT %s"""
_LETTER_IDS = """SELECT d.id FROM {s}.dead d WHERE d.queue = %s AND d.id < %s AND d.id >= %s
    AND (%s::text IS NULL OR d.key = %s::text) AND position(%s in d.reason) > 0 ORDER BY d.id DESC"""
_FLOOR = "SELECT id FROM {s}.dead WHERE queue = %s AND id < %s ORDER BY id DESC LIMIT 1 OFFSET %s"
_LETTER = f"""SELECT {LETTER_COLUMNS} FROM {{s}}.dead d JOIN {{s}}.queue q ON q.id = d.queue
    WHERE d.queue = %s AND d.id = %s"""
_LETTER_COUNT = "SELECT count(*) FROM (SELECT 1 FROM {s}.dead WHERE queue = %s LIMIT %s) AS bounded"
_CLAIMED_MAX = 20_000


class PostgresBrowser:
    """The part of the store that lists entries page by page."""

    _runner: StatementRunner
    _schema: str
    _now: str

    async def _rows(self, sql: str, queue: QueueRef, *parameters: object) -> list[Any]:
        text = statement(sql, self._schema, queue.table, self._now)
        return await self._runner.rows(text, parameters, writes=False)

    async def browse(
        self, queue: QueueRef, wanted: EntryFilter, *, after: EntryPlace | None = None, limit: int = 100
    ) -> list[BrowsedEntry]:
        ((now_ms,),) = await self._rows(_NOW, queue)
        if wanted.key is not None:
            return await self._of_key(queue, now_ms, wanted) if after is None else []
        if wanted.state == "processing":
            place = after or EntryPlace(0, 0, -1)
            rows: list[BrowsedEntry] = []
            while len(rows) < limit:
                low = (queue.id, place.date_ms)
                page = _entries(await self._rows(_HELD, queue, *low, *low, place.date_ms, place.id, limit))
                rows += [each for each in page if wanted.selects(each, now_ms)]
                if len(page) < limit:
                    break
                place = page[-1].place
            return rows[:limit]
        found: list[BrowsedEntry] = []
        async for parameters in self._ranges(queue, now_ms, wanted, after):
            found += _entries(await self._rows(_WAITING, queue, *parameters, limit - len(found)))
            if len(found) == limit:
                break
        return found

    async def _ranges(
        self, queue: QueueRef, now_ms: int, wanted: EntryFilter, after: EntryPlace | None
    ) -> AsyncIterator[tuple[int, ...]]:
        """Yield the parameters of `_RANGE` for each priority: dates are a range of the index in one of them only."""
        low, high = wanted.dates(now_ms)
        first = 0 if after is None else after.priority
        priority = wanted.priority
        if priority is None:
            priority = await self._next_priority(queue, first)
        while priority is not None:
            place = after if after is not None and after.priority == priority else EntryPlace(0, -1, -1)
            if priority >= first:
                # Either bound may be the one that the planner seeks by, so both are as tight as they can be.
                start = max((place.date_ms, place.id), (low, -1))
                yield queue.id, priority, low, high, *start, now_ms
            if wanted.priority is not None:
                return
            priority = await self._next_priority(queue, priority + 1)

    async def _next_priority(self, queue: QueueRef, least: int) -> int | None:
        rows = await self._rows(_NEXT_PRIORITY, queue, queue.id, least)
        return int(rows[0][0]) if rows else None

    async def _of_key(self, queue: QueueRef, now_ms: int, wanted: EntryFilter) -> list[BrowsedEntry]:
        keyhash = (wanted.keyhash or b"").hex()
        if wanted.state == "processing":
            # A bundle has no index by the keys inside: what is processed is bounded, and is looked through.
            rows = await self._rows(_HELD, queue, queue.id, 0, queue.id, 0, 0, -1, _CLAIMED_MAX)
        else:
            rows = await self._rows(_WAITING_KEY, queue, queue.id, keyhash, now_ms)
        return [each for each in _entries(rows) if wanted.selects(each, now_ms)]

    async def count_up_to(self, queue: QueueRef, wanted: EntryFilter, *, limit: int) -> int:
        ((now_ms,),) = await self._rows(_NOW, queue)
        if wanted.key is not None:
            return min(limit, len(await self._of_key(queue, now_ms, wanted)))
        if wanted.state == "processing":
            if wanted != EntryFilter(state="processing"):
                return len(await self.browse(queue, wanted, limit=limit))
            ((count,),) = await self._rows(_HELD_COUNT, queue, queue.id, 0, queue.id, 0, limit)
            return int(count)
        total = 0
        async for parameters in self._ranges(queue, now_ms, wanted, None):
            ((count,),) = await self._rows(_WAITING_COUNT, queue, *parameters, limit - total)
            total += count
            if total >= limit:
                break
        return total

    async def claims(self, queue: QueueRef, *, limit: int = 100) -> list[ClaimSummary]:
        rows = await self._rows(_CLAIMS, queue, queue.id, _CLAIMED_MAX, limit)
        return [
            ClaimSummary(token=token, entries=entries, started_at=started_at, lease_until=lease_until)
            for token, entries, started_at, lease_until in rows
        ]

    async def remove(self, queue: QueueRef, places: Sequence[EntryPlace]) -> int:
        columns = [number_array(column) for column in zip(*places, strict=True)]
        if not columns:
            return 0
        text = statement(_REMOVE, self._schema, queue.table, self._now)
        ((count,),) = await self._runner.rows(text, (*columns, queue.id), level=queue.settings.synchronous)
        return int(count)

    async def letters(
        self, queue: QueueRef, wanted: LetterFilter, *, before: int | None = None, limit: int = 100
    ) -> LetterPage:
        below = 2**63 - 1 if before is None else before
        floors = await self._rows(_FLOOR, queue, queue.id, below, LETTERS_SCANNED_MAX)
        floor = floors[0][0] if floors else None
        parameters = (queue.id, below, floor or 0, wanted.key, wanted.key, wanted.reason, limit)
        found = [DeadLetterRow(*row) for row in await self._rows(_LETTERS, queue, *parameters)]
        return LetterPage(letters=found, before=found[-1].id if len(found) == limit else floor)

    async def letter_ids(
        self, queue: QueueRef, wanted: LetterFilter, *, before: int | None = None
    ) -> tuple[list[int], int | None]:
        below = 2**63 - 1 if before is None else before
        floors = await self._rows(_FLOOR, queue, queue.id, below, LETTERS_SCANNED_MAX)
        floor = floors[0][0] if floors else None
        parameters = (queue.id, below, floor or 0, wanted.key, wanted.key, wanted.reason)
        return [id for (id,) in await self._rows(_LETTER_IDS, queue, *parameters)], floor

    async def letter(self, queue: QueueRef, id: int) -> DeadLetterRow | None:
        rows = await self._rows(_LETTER, queue, queue.id, id)
        return DeadLetterRow(*rows[0]) if rows else None

    async def count_letters(self, queue: QueueRef, *, limit: int) -> int:
        ((count,),) = await self._rows(_LETTER_COUNT, queue, queue.id, limit)
        return int(count)


def _entries(rows: list[Any]) -> list[BrowsedEntry]:
    return [BrowsedEntry(WaitingEntry(*row[:-1]), row[-1]) for row in rows]
