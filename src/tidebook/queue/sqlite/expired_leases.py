"""Entries that fail or expire, or whose lease does, in SQLite: requeued, made dead letters, or deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from tidebook.queue.port import NEVER_MS, Failure, MaintenanceResult, Outcome, QueueRef
from tidebook.queue.sqlite.tables import channel_of
from tidebook.sqlite.writer import WriteTransaction

EXPIRED_LEASES_MAX = 500
EXPIRED_ENTRIES_MAX = 2_000

_EXPIRED_LEASES = """SELECT id, timeouts, expires_at FROM entry INDEXED BY entry_lease
    WHERE queue = ? AND status = 'P' AND lease_until BETWEEN 1 AND ? ORDER BY lease_until LIMIT ?"""
_COUNT_TIMEOUT = "UPDATE entry SET lease_until = 0, timeouts = timeouts + 1 WHERE id = ?"
_INSERT_DEAD = """INSERT INTO dead (queue, raised_at, reason, keyhash, key, priority, timeouts, inserted_at, expires_at,
    format, kind, data, trace) SELECT queue, ?, ?, keyhash, key, priority, ?, inserted_at, expires_at, format, kind,
    data, trace FROM entry WHERE id = ?"""
_SIBLING = """SELECT w.id FROM entry AS e JOIN entry AS w INDEXED BY entry_waiting
    ON w.queue = e.queue AND w.status = 'W' AND w.key IS NOT NULL AND w.keyhash = e.keyhash
    WHERE e.id = ? AND e.key IS NOT NULL"""
_MERGED_COLUMNS = "SELECT priority, process_at, expires_at, inserted_at FROM entry WHERE id = ?"
# The merged entry takes the id of the older one, and with it its position among entries of the same date.
_MERGE = """UPDATE entry SET id = ?, timeouts = ?, priority = min(priority, ?), process_at = max(process_at, ?),
    expires_at = max(expires_at, ?), inserted_at = ? WHERE id = ?"""
_WAIT = """UPDATE entry SET status = 'W', token = NULL, started_at = NULL, lease_until = NULL, serial = NULL,
    timeouts = ?, process_at = ? WHERE id = ?"""
_EXPIRED_LEASES_OF = """SELECT id, timeouts, expires_at, process_at FROM entry INDEXED BY entry_held
    WHERE queue = ? AND status = 'P' AND key IS NOT NULL AND +lease_until = 0
    AND keyhash IN (SELECT unhex(value) FROM json_each(?)) ORDER BY id"""
_HELD = "SELECT timeouts, lease_until, expires_at, keyhash FROM entry WHERE id = ? AND status = 'P' AND token = ?"
_DELETE_EXPIRED = """DELETE FROM entry WHERE id IN (SELECT id FROM entry INDEXED BY entry_expiry
    WHERE queue = ? AND status = 'W' AND expires_at < 9223372036854775807 AND expires_at <= ? LIMIT ?)"""
_DELETE_EXPIRED_HELD = """DELETE FROM entry INDEXED BY entry_lease
    WHERE queue = ? AND status = 'P' AND lease_until = 0 AND expires_at <= ?"""
_NEXT_EXPIRY = """SELECT min(expires_at) FROM entry INDEXED BY entry_expiry
    WHERE queue = ? AND status = 'W' AND expires_at < 9223372036854775807"""
_NEXT_LEASE = (
    "SELECT min(lease_until) FROM entry INDEXED BY entry_lease WHERE queue = ? AND status = 'P' AND lease_until > 0"
)


def expire_leases(connection: apsw.Connection, queue: QueueRef, now_ms: int) -> tuple[int, int, int]:
    """Expire the leases that have ended; return the numbers of leases, of new dead letters and of expired entries.

    An entry keeps status P with `lease_until = 0` until it is claimed again or a put of its key is merged into it.
    """
    execute = connection.execute
    rows: list[Any] = execute(_EXPIRED_LEASES, (queue.id, now_ms, EXPIRED_LEASES_MAX)).fetchall()
    dead = expired = 0
    for id, timeouts, expires_at in rows:
        retired = _retire(connection, queue, now_ms, id, timeouts + 1, expires_at, "its lease ran out")
        expired += retired == "expired"
        dead += retired == "dead"
        if retired is None and not _merge_into_sibling(connection, id, timeouts + 1, now_ms, None):
            execute(_COUNT_TIMEOUT, (id,))
    return len(rows), dead, expired


def requeue_expired(connection: apsw.Connection, queue: QueueRef, now_ms: int, hashes: str) -> None:
    """Return entries of these keys with an expired lease to waiting, so that a put can be merged into them."""
    rows: list[Any] = connection.execute(_EXPIRED_LEASES_OF, (queue.id, hashes)).fetchall()
    for id, timeouts, expires_at, process_at in rows:
        if expires_at <= now_ms:
            _delete(connection, id)
        elif not _merge_into_sibling(connection, id, timeouts, now_ms, None):
            connection.execute(_WAIT, (timeouts, process_at, id))


def sweep(session: WriteTransaction, now_ms: int, queue: QueueRef) -> MaintenanceResult:
    connection = session.connection
    expired_leases, dead, expired = expire_leases(connection, queue, now_ms)
    connection.execute(_DELETE_EXPIRED_HELD, (queue.id, now_ms))
    expired += connection.changes()
    connection.execute(_DELETE_EXPIRED, (queue.id, now_ms, EXPIRED_ENTRIES_MAX))
    expired += connection.changes()
    dates: list[Any] = [connection.execute(sql, (queue.id,)).get for sql in (_NEXT_EXPIRY, _NEXT_LEASE)]
    next_at = min((date for date in dates if date is not None), default=NEVER_MS)
    return MaintenanceResult(expired, expired_leases, dead, next_at, now_ms)


def fail(session: WriteTransaction, now_ms: int, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
    session.channels.add(channel_of(queue.id))
    return [_fail(session.connection, now_ms, queue, failure) for failure in failures]


def _fail(connection: apsw.Connection, now_ms: int, queue: QueueRef, failure: Failure) -> Outcome:
    id = failure.held.slot
    found: Any = connection.execute(_HELD, (id, failure.held.token)).fetchone()
    if found is None or found[3] != failure.held.keyhash:
        return "lost"
    timeouts, lease_until, expires_at, _ = found
    total_timeouts: int = timeouts if lease_until == 0 else timeouts + 1
    retired = _retire(connection, queue, now_ms, id, total_timeouts, expires_at, failure.reason)
    if retired is not None:
        return retired
    at_ms = now_ms + failure.delay_ms
    if _merge_into_sibling(connection, id, total_timeouts, now_ms, at_ms):
        return "merged"
    connection.execute(_WAIT, (total_timeouts, at_ms, id))
    return "waiting"


def _retire(
    connection: apsw.Connection, queue: QueueRef, now_ms: int, id: int, timeouts: int, expires_at: int, reason: str
) -> Outcome | None:
    """Delete an entry that has expired, or that timed out or failed too often and is a dead letter."""
    if now_ms < expires_at and timeouts <= queue.settings.max_timeouts:
        return None
    outcome: Outcome = "expired" if expires_at <= now_ms else "dead"
    if outcome == "dead":
        connection.execute(_INSERT_DEAD, (now_ms, reason, timeouts, id))
    _delete(connection, id)
    return outcome


def _merge_into_sibling(
    connection: apsw.Connection, id: int, timeouts: int, now_ms: int, process_at: int | None
) -> bool:
    """Merge an entry into the waiting one of its key; return False if there is none. An expired one is deleted."""
    sibling: int | None = connection.execute(_SIBLING, (id,)).get
    if sibling is None:
        return False
    sibling_expires_at: Any = connection.execute("SELECT expires_at FROM entry WHERE id = ?", (sibling,)).get
    if sibling_expires_at <= now_ms:
        _delete(connection, sibling)
        return False
    columns: Any = connection.execute(_MERGED_COLUMNS, (id,)).fetchone()
    priority, old_process_at, expires_at, inserted_at = columns
    _delete(connection, id)
    at_ms = old_process_at if process_at is None else process_at
    connection.execute(_MERGE, (id, timeouts, priority, at_ms, expires_at, inserted_at, sibling))
    return True


def _delete(connection: apsw.Connection, id: int) -> None:
    connection.execute("DELETE FROM entry WHERE id = ?", (id,))
