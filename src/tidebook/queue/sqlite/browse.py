"""Bounded listings of entries and dead letters in SQLite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import apsw

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
from tidebook.sqlite.writer import WriteTransaction

_COLUMNS = """id, key, status, priority, timeouts, inserted_at, process_at, expires_at, started_at, lease_until, kind,
    data, token"""
_NEXT_PRIORITY = """SELECT priority FROM entry INDEXED BY entry_order WHERE queue = ? AND status = 'W' AND priority >= ?
    ORDER BY priority LIMIT 1"""
_RANGE = """FROM entry INDEXED BY entry_order WHERE queue = ? AND status = 'W' AND priority = ?
    AND process_at BETWEEN ? AND ? AND (process_at, id) > (?, ?) AND expires_at > ?"""
_WAITING = f"SELECT {_COLUMNS} {_RANGE} ORDER BY process_at, id LIMIT ?"
_WAITING_COUNT = f"SELECT count(*) FROM (SELECT 1 {_RANGE} LIMIT ?)"
_WAITING_KEY = f"""SELECT {_COLUMNS} FROM entry INDEXED BY entry_waiting
    WHERE queue = ? AND status = 'W' AND key IS NOT NULL AND keyhash = ? AND expires_at > ?"""
_HELD = f"""SELECT {_COLUMNS} FROM entry INDEXED BY entry_lease WHERE queue = ? AND status = 'P'
    AND (lease_until, id) > (?, ?) ORDER BY lease_until, id LIMIT ?"""
_HELD_KEY = f"""SELECT {_COLUMNS} FROM entry INDEXED BY entry_held
    WHERE queue = ? AND status = 'P' AND key IS NOT NULL AND keyhash = ?"""
_HELD_COUNT = """SELECT count(*) FROM (SELECT 1 FROM entry INDEXED BY entry_lease WHERE queue = ? AND status = 'P'
    LIMIT ?)"""
_CLAIMS = """SELECT token, count(*), min(started_at), min(lease_until) FROM (
        SELECT token, started_at, lease_until FROM entry INDEXED BY entry_lease
        WHERE queue = ? AND status = 'P' AND token IS NOT NULL ORDER BY lease_until LIMIT ?)
    GROUP BY token ORDER BY min(lease_until) LIMIT ?"""
_REMOVE = """DELETE FROM entry INDEXED BY entry_order
    WHERE queue = ? AND status = 'W' AND priority = ? AND process_at = ? AND id = ?"""
_LETTER_COLUMNS = """d.id, q.name, d.raised_at, d.reason, d.key, d.priority, d.timeouts, d.inserted_at, d.expires_at,
    d.kind, d.data"""
_LETTERS = f"""SELECT {_LETTER_COLUMNS} FROM dead AS d JOIN queue AS q ON q.id = d.queue
    WHERE d.queue = ? AND d.id < ? AND d.id >= ? {{}} AND instr(d.reason, ?) ORDER BY d.id DESC LIMIT ?"""
_LETTER_IDS = """SELECT id FROM dead INDEXED BY dead_by_queue WHERE queue = ? AND id < ? AND id >= ? {}
    AND instr(reason, ?) ORDER BY id DESC"""
#: The id at which a page of dead letters ends its search.
_FLOOR = "SELECT id FROM dead INDEXED BY dead_by_queue WHERE queue = ? AND id < ? ORDER BY id DESC LIMIT 1 OFFSET ?"
_LETTER = f"SELECT {_LETTER_COLUMNS} FROM dead AS d JOIN queue AS q ON q.id = d.queue WHERE d.queue = ? AND d.id = ?"
_LETTER_COUNT = "SELECT count(*) FROM (SELECT 1 FROM dead INDEXED BY dead_by_queue WHERE queue = ? LIMIT ?)"
#: How many entries in processing are examined for claims.
_CLAIMED_MAX = 20_000


def browse(
    connection: apsw.Connection,
    queue: QueueRef,
    now_ms: int,
    wanted: EntryFilter,
    after: EntryPlace | None,
    limit: int,
) -> list[BrowsedEntry]:
    """Return a page of entries."""
    if wanted.key is not None:
        return _of_key(connection, queue, now_ms, wanted) if after is None else []
    if wanted.state == "processing":
        place = after or EntryPlace(0, -1, -1)
        rows: list[BrowsedEntry] = []
        while len(rows) < limit:
            page = _entries(connection.execute(_HELD, (queue.id, place.date_ms, place.id, limit)))
            rows += [each for each in page if wanted.selects(each, now_ms)]
            if len(page) < limit:
                break
            place = page[-1].place
        return rows[:limit]
    found: list[BrowsedEntry] = []
    for bindings in _ranges(connection, queue, now_ms, wanted, after):
        found += _entries(connection.execute(_WAITING, (*bindings, limit - len(found))))
        if len(found) == limit:
            break
    return found


def _ranges(
    connection: apsw.Connection, queue: QueueRef, now_ms: int, wanted: EntryFilter, after: EntryPlace | None
) -> Iterator[tuple[int, ...]]:
    """Yield the bindings of `_RANGE` for each priority: dates are a range of the index only within one."""
    low, high = wanted.dates(now_ms)
    first = 0 if after is None else after.priority
    priority: int | None = wanted.priority
    if priority is None:
        priority = connection.execute(_NEXT_PRIORITY, (queue.id, first)).get
    while priority is not None:
        place = after if after is not None and after.priority == priority else EntryPlace(0, -1, -1)
        if priority >= first:
            # Either bound may be the one that the planner seeks by, so both are as tight as they can be.
            start = max((place.date_ms, place.id), (low, -1))
            yield queue.id, priority, low, high, *start, now_ms
        if wanted.priority is not None:
            return
        priority = connection.execute(_NEXT_PRIORITY, (queue.id, priority + 1)).get


def _of_key(connection: apsw.Connection, queue: QueueRef, now_ms: int, wanted: EntryFilter) -> list[BrowsedEntry]:
    if wanted.state == "processing":
        rows = connection.execute(_HELD_KEY, (queue.id, wanted.keyhash))
    else:
        rows = connection.execute(_WAITING_KEY, (queue.id, wanted.keyhash, now_ms))
    return [each for each in _entries(rows) if wanted.selects(each, now_ms)]


def _entries(rows: Any) -> list[BrowsedEntry]:
    return [BrowsedEntry(WaitingEntry(*row[:-1]), row[-1]) for row in rows]


def count_up_to(connection: apsw.Connection, queue: QueueRef, now_ms: int, wanted: EntryFilter, limit: int) -> int:
    """Return how many entries match, at most `limit`."""
    if wanted.key is not None:
        return min(limit, len(_of_key(connection, queue, now_ms, wanted)))
    count: int = 0
    if wanted.state == "processing":
        if wanted == EntryFilter(state="processing"):
            count = connection.execute(_HELD_COUNT, (queue.id, limit)).get
            return count
        return len(browse(connection, queue, now_ms, wanted, None, limit))
    for bindings in _ranges(connection, queue, now_ms, wanted, None):
        count += connection.execute(_WAITING_COUNT, (*bindings, limit - count)).get
        if count >= limit:
            break
    return count


def claims(connection: apsw.Connection, queue: QueueRef, limit: int) -> list[ClaimSummary]:
    """Return the claims that hold entries."""
    rows: Any = connection.execute(_CLAIMS, (queue.id, _CLAIMED_MAX, limit))
    return [
        ClaimSummary(token=token, entries=entries, started_at=started_at, lease_until=lease_until)
        for token, entries, started_at, lease_until in rows
    ]


def remove(session: WriteTransaction, now_ms: int, queue: QueueRef, places: Sequence[EntryPlace]) -> int:
    """Delete entries that wait."""
    removed = 0
    for place in places:
        session.connection.execute(_REMOVE, (queue.id, *place))
        removed += session.connection.changes()
    return removed


def letters(
    connection: apsw.Connection, queue: QueueRef, wanted: LetterFilter, before: int | None, limit: int
) -> LetterPage:
    """Return a page of dead letters."""
    below = 2**63 - 1 if before is None else before
    floor: int | None = connection.execute(_FLOOR, (queue.id, below, LETTERS_SCANNED_MAX)).get
    key, bindings = ("", ()) if wanted.key is None else ("AND d.key = ?", (wanted.key,))
    parameters = (queue.id, below, floor or 0, *bindings, wanted.reason, limit)
    found = [DeadLetterRow(*row) for row in connection.execute(_LETTERS.format(key), parameters)]
    return LetterPage(letters=found, before=found[-1].id if len(found) == limit else floor)


def letter_ids(
    connection: apsw.Connection, queue: QueueRef, wanted: LetterFilter, before: int | None
) -> tuple[list[int], int | None]:
    """Return the ids of matching dead letters, and where to continue."""
    below = 2**63 - 1 if before is None else before
    floor: int | None = connection.execute(_FLOOR, (queue.id, below, LETTERS_SCANNED_MAX)).get
    key, bindings = ("", ()) if wanted.key is None else ("AND key = ?", (wanted.key,))
    parameters = (queue.id, below, floor or 0, *bindings, wanted.reason)
    rows: Any = connection.execute(_LETTER_IDS.format(key), parameters)
    return [id for (id,) in rows], floor


def letter(connection: apsw.Connection, queue: QueueRef, id: int) -> DeadLetterRow | None:
    """Return one dead letter."""
    row: Any = connection.execute(_LETTER, (queue.id, id)).fetchone()
    return None if row is None else DeadLetterRow(*row)


def count_letters(connection: apsw.Connection, queue: QueueRef, limit: int) -> int:
    """Return how many dead letters there are, at most `limit`."""
    count: int = connection.execute(_LETTER_COUNT, (queue.id, limit)).get
    return count
