"""Claims, heartbeats and finishing in SQLite, run by the writer thread.

A query returns its rows as one JSON value: each step of a statement releases the interpreter lock, and under a busy
event loop every reacquisition is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import apsw
import msgspec

from tidebook.queue.port import SLOW_PRIORITY, Claimed, FinishingClaim, LeasedEntry, QueueRef, limits_without_loss
from tidebook.queue.sqlite.expired_leases import expire_leases
from tidebook.queue.sqlite.reads import NEXT_PRIORITY, paused_at
from tidebook.queue.sqlite.tables import channel_of
from tidebook.sqlite.writer import WriteTransaction

#: A claim ends at CLAIM_BYTES_MAX bytes of data. Data above INLINE_BYTES_MAX is fetched separately, and at most
#: PICK_MAX entries are picked together, so that the JSON text stays small compared with the claim.
CLAIM_BYTES_MAX = 64_000_000
INLINE_BYTES_MAX = 32_000
PICK_MAX = 1_000

_ROWS = f"""SELECT json_group_array(json_array(id, hex(keyhash), key, priority, timeouts, format, inserted_at,
    process_at, expires_at, kind, CASE WHEN length(data) <= {INLINE_BYTES_MAX} THEN hex(data) ELSE length(data) END,
    trace))"""
_PICK = f"""{_ROWS} FROM (SELECT e.* FROM entry AS e INDEXED BY entry_order
    WHERE e.queue = ?1 AND e.status = 'W' AND e.priority = ?2 AND e.process_at <= ?3 AND e.expires_at > ?3
    AND (e.key IS NULL OR NOT ?4 OR NOT EXISTS (SELECT 1 FROM entry AS h INDEXED BY entry_held
        WHERE h.queue = ?1 AND h.status = 'P' AND h.key IS NOT NULL AND h.keyhash = e.keyhash))
    ORDER BY e.process_at, e.id LIMIT ?5)"""
_ANY_EXPIRED = (
    "SELECT 1 FROM entry INDEXED BY entry_lease WHERE queue = ? AND status = 'P' AND lease_until <= ? LIMIT 1"
)
_NEXT_EXPIRED = """SELECT min(priority) FROM entry INDEXED BY entry_lease
    WHERE queue = ? AND status = 'P' AND lease_until = 0 AND priority >= ?"""
_PICK_EXPIRED = f"""{_ROWS} FROM (SELECT e.* FROM entry AS e INDEXED BY entry_lease
    WHERE e.queue = ? AND e.status = 'P' AND e.lease_until = 0 AND e.priority = ? AND e.expires_at > ?
    ORDER BY e.process_at, e.id LIMIT ?)"""
_DATA = "SELECT data FROM entry WHERE id = ?"
_LEASE = """UPDATE entry SET status = 'P', token = ?, started_at = ?, lease_until = ?, serial = ?
    WHERE id IN (SELECT value FROM json_each(?))"""
# The ids that are held under one token, and whether an entry waits for one of their keys.
_FIND_HELD = """SELECT json_group_array(e.id), max(e.key IS NOT NULL AND EXISTS (
        SELECT 1 FROM entry AS w INDEXED BY entry_waiting
        WHERE w.queue = e.queue AND w.status = 'W' AND w.key IS NOT NULL AND w.keyhash = e.keyhash))
    FROM json_each(?) AS asked CROSS JOIN entry AS e ON e.id = asked.value WHERE e.status = 'P' AND e.token = ?"""
_DELETE = "DELETE FROM entry WHERE id IN (SELECT value FROM json_each(?))"
_EXTEND = "UPDATE entry SET lease_until = ? WHERE id IN (SELECT value FROM json_each(?))"

_encode = msgspec.json.Encoder().encode
_Row = tuple[int, str, str | None, int, int, int, int, int, int, int, str | int, str | None]
_decode_rows = msgspec.json.Decoder(list[_Row]).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode


def claim(
    session: WriteTransaction, now_ms: int, queue: QueueRef, limits: Mapping[bytes, int], lease_ms: int
) -> list[Claimed]:
    """Serve each caller in turn; `limits` has its token and its limit."""
    claimed: list[Claimed] = []
    if paused_at(session.connection, queue) is not None:
        return claimed
    for token, limit in limits.items():
        claimed += _claim(session.connection, now_ms, queue, limit, lease_ms, token)
    return claimed


def _claim(
    connection: apsw.Connection, now_ms: int, queue: QueueRef, limit: int, lease_ms: int, token: bytes
) -> list[Claimed]:
    any_expired = connection.execute(_ANY_EXPIRED, (queue.id, now_ms)).fetchone() is not None
    if any_expired:
        expire_leases(connection, queue, now_ms)
    found: list[Claimed] = []
    min_priority, room_bytes = 0, CLAIM_BYTES_MAX
    while len(found) < limit and room_bytes > 0:
        wanted = min(limit - len(found), PICK_MAX)
        priority, expired_here = _next_priority(connection, queue.id, min_priority, any_expired=any_expired)
        if priority is None or (priority >= SLOW_PRIORITY and found and found[0].priority < SLOW_PRIORITY):
            break
        rows = _rows(connection, _PICK, (queue.id, priority, now_ms, not queue.settings.parallel_keys, wanted))
        if expired_here:
            rows += _rows(connection, _PICK_EXPIRED, (queue.id, priority, now_ms, wanted))
            rows.sort(key=itemgetter(7, 0))  # by date and id
        rows, room_bytes = _take_fitting(rows[:wanted], room_bytes)
        found += _lease(connection, now_ms, queue, lease_ms, token, rows)
        min_priority = priority if len(rows) == PICK_MAX else priority + 1
    found.sort(key=attrgetter("priority", "process_at", "id"))
    return found


def _lease(
    connection: apsw.Connection, now_ms: int, queue: QueueRef, lease_ms: int, token: bytes, rows: list[_Row]
) -> list[Claimed]:
    if not rows:
        return []
    until, serial = now_ms + lease_ms, None if queue.settings.parallel_keys else 1
    connection.execute(_LEASE, (token, now_ms, until, serial, _encode([row[0] for row in rows]).decode()))
    return [
        Claimed(id, id, bytes.fromhex(hash_), key, priority, timeouts, format, inserted_at, process_at, expires_at,
            now_ms, until, kind,
            bytes.fromhex(data) if type(data) is str else connection.execute(_DATA, (id,)).get, token, 0, trace)
        for id, hash_, key, priority, timeouts, format, inserted_at, process_at, expires_at, kind, data, trace in rows
    ]  # fmt: skip


def finish(session: WriteTransaction, now_ms: int, queue: QueueRef, held: Sequence[LeasedEntry]) -> set[LeasedEntry]:
    """Delete the entries that are held; return them."""
    deleted: set[LeasedEntry] = set()
    for found, ids, has_sibling in _find_held(session.connection, held):
        session.connection.execute(_DELETE, (ids,))
        deleted.update(found)
        if has_sibling:  # a listener may sleep because the key of due work was held
            session.channels.add(channel_of(queue.id))
    return deleted


def finish_and_claim(
    session: WriteTransaction, now_ms: int, queue: QueueRef, claims: Sequence[FinishingClaim], lease_ms: int
) -> tuple[set[LeasedEntry], list[Claimed]]:
    """Delete the entries that are held, then serve the callers that have lost none."""
    finished = finish(session, now_ms, queue, [each for one in claims for each in one.finished])
    return finished, claim(session, now_ms, queue, limits_without_loss(claims, finished), lease_ms)


def heartbeat(
    session: WriteTransaction, now_ms: int, held: Sequence[LeasedEntry], lease_ms: int
) -> dict[LeasedEntry, int]:
    """Extend the leases that are held; return their new ends."""
    extended: dict[LeasedEntry, int] = {}
    for found, ids, _ in _find_held(session.connection, held):
        session.connection.execute(_EXTEND, (now_ms + lease_ms, ids))
        extended.update(dict.fromkeys(found, now_ms + lease_ms))
    return extended


def _rows(connection: apsw.Connection, pick: str, parameters: tuple[Any, ...]) -> list[_Row]:
    text: str = connection.execute(pick, parameters).get
    return _decode_rows(text)


def _take_fitting(rows: list[_Row], room_bytes: int) -> tuple[list[_Row], int]:
    """Return the first rows whose data fits into the given size, at least one, and the remaining size."""
    for index, row in enumerate(rows):
        data = row[10]
        room_bytes -= data if type(data) is int else len(data) // 2  # type: ignore[arg-type]
        if room_bytes <= 0:
            return rows[: index + 1], 0
    return rows, room_bytes


def _next_priority(
    connection: apsw.Connection, queue: int, min_priority: int, *, any_expired: bool
) -> tuple[int | None, bool]:
    """Return the next priority that has entries, and whether an expired lease is among them."""
    waiting: int | None = connection.execute(NEXT_PRIORITY, (queue, min_priority)).get
    if not any_expired:
        return waiting, False
    expired: int | None = connection.execute(_NEXT_EXPIRED, (queue, min_priority)).get
    if expired is None or (waiting is not None and waiting < expired):
        return waiting, False
    return expired, True


def _find_held(
    connection: apsw.Connection, held: Sequence[LeasedEntry]
) -> Iterator[tuple[list[LeasedEntry], str, int | None]]:
    """Yield, for each token, the held entries, their ids as JSON, and whether an entry waits for one of their keys."""
    by_token: dict[bytes, dict[int, LeasedEntry]] = {}
    for entry in held:
        by_token.setdefault(entry.token, {})[entry.slot] = entry
    for token, requested in by_token.items():
        row: Any = connection.execute(_FIND_HELD, (_encode(list(requested)).decode(), token)).fetchone()
        ids, has_sibling = row
        found = (
            list(requested.values())
            if ids.count(",") == len(requested) - 1 and ids != "[]"
            else [requested[id] for id in _decode_ids(ids)]
        )
        yield found, ids, has_sibling
