"""The reads of the store in SQLite: due dates, entries and counts. They run in the caller's thread."""

from __future__ import annotations

from typing import Any

import apsw

from tidebook.queue.port import NEVER_MS, UPCOMING_MAX, Counts, Due, QueueRef, WaitingEntry

_LEASE_END = """SELECT lease_until FROM entry INDEXED BY entry_lease
    WHERE queue = ? AND status = 'P' AND (lease_until > 0 OR expires_at > ?) ORDER BY lease_until LIMIT 1"""
NEXT_PRIORITY = """SELECT priority FROM entry INDEXED BY entry_order
    WHERE queue = :queue AND status = 'W' AND priority >= :least ORDER BY priority LIMIT 1"""
_DUE = """SELECT 1 FROM entry AS e INDEXED BY entry_order WHERE e.queue = ?1 AND e.status = 'W' AND e.priority = ?2
    AND e.process_at <= ?3 AND e.expires_at > ?3 {free} LIMIT 1"""
_FREE = """AND (e.key IS NULL OR NOT ?4 OR NOT EXISTS (SELECT 1 FROM entry AS h INDEXED BY entry_held
        WHERE h.queue = ?1 AND h.status = 'P' AND h.key IS NOT NULL AND h.keyhash = e.keyhash))"""
_ANY_FREE, _ANY_DUE = _DUE.format(free=_FREE), _DUE.format(free="AND ?4 IS NOT NULL")
_UPCOMING = """SELECT process_at FROM entry INDEXED BY entry_order
    WHERE queue = ? AND status = 'W' AND priority = ? AND process_at > ? ORDER BY process_at LIMIT ?"""
ENTRY_COLUMNS = """id, key, status, priority, timeouts, inserted_at, process_at, expires_at, started_at, lease_until,
    kind, data"""
_PROCESSING = f"""SELECT {ENTRY_COLUMNS} FROM entry INDEXED BY entry_lease WHERE queue = ? AND status = 'P'
    ORDER BY priority, process_at, id LIMIT ?"""
_WAITING = f"""SELECT {ENTRY_COLUMNS} FROM entry INDEXED BY entry_order
    WHERE queue = ? AND status = 'W' AND expires_at > ? ORDER BY priority, process_at, id LIMIT ?"""
_COUNTS = """SELECT count(*) FILTER (WHERE free AND process_at <= ?2), count(*) FILTER (WHERE free AND process_at > ?2),
    count(*) FILTER (WHERE NOT free), coalesce(max(?2 - process_at) FILTER (WHERE free AND process_at <= ?2), 0),
    coalesce(min(process_at) FILTER (WHERE free), 9223372036854775807)
    FROM (SELECT process_at, status = 'W' OR lease_until <= ?2 AS free FROM entry
        WHERE queue = ?1 AND status IN ('W', 'P') AND expires_at > ?2)"""


def due(connection: apsw.Connection, queue: QueueRef, now_ms: int) -> Due:
    execute = connection.execute
    if paused_at(connection, queue) is not None:
        return Due(now_ms, NEVER_MS, ready=False, held=False, paused=True)
    lease_until: int | None = execute(_LEASE_END, (queue.id, now_ms)).get
    lease_end = NEVER_MS if lease_until is None else lease_until
    ready, held, upcoming = lease_end <= now_ms, False, list[int]()
    serial = not queue.settings.parallel_keys
    priority: int | None = execute(NEXT_PRIORITY, (queue.id, 0)).get
    while priority is not None:
        parameters = (queue.id, priority, now_ms, serial)
        if not ready and execute(_ANY_DUE, parameters).fetchone() is not None:
            ready = execute(_ANY_FREE, parameters).fetchone() is not None
            held = held or not ready
        upcoming += [date for (date,) in execute(_UPCOMING, (queue.id, priority, now_ms, UPCOMING_MAX))]
        priority = execute(NEXT_PRIORITY, (queue.id, priority + 1)).get
    return Due(now_ms, lease_end, ready, held, tuple(sorted(upcoming)[:UPCOMING_MAX]))


def entries(connection: apsw.Connection, queue: QueueRef, now_ms: int, limit: int) -> list[WaitingEntry]:
    rows: list[Any] = connection.execute(_PROCESSING, (queue.id, limit)).fetchall()
    rows += connection.execute(_WAITING, (queue.id, now_ms, limit - len(rows))).fetchall()
    return [WaitingEntry(*row) for row in rows]


def counts(connection: apsw.Connection, queue: QueueRef, now_ms: int) -> Counts:
    found: Any = connection.execute(_COUNTS, (queue.id, now_ms)).fetchone()
    ready, later, processing, oldest_ms, next_at = found
    dead: int = connection.execute("SELECT count(*) FROM dead WHERE queue = ?", (queue.id,)).get
    return Counts(ready, later, processing, dead, oldest_ms, next_at, 1, paused_at(connection, queue))


def paused_at(connection: apsw.Connection, queue: QueueRef) -> int | None:
    date_ms: int | None = connection.execute("SELECT paused_at FROM queue WHERE id = ?", (queue.id,)).get
    return date_ms
