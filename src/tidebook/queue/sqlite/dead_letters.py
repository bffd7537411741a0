"""Dead letters in SQLite: the newest, and those that the writer thread retries, edits, drops and announces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from tidebook.queue.port import NEVER_MS, DeadLetterRow, NewEntry, QueueRef
from tidebook.queue.sqlite.puts import insert
from tidebook.queue.sqlite.tables import channel_of
from tidebook.sqlite.writer import WriteTransaction

_TAKE = """DELETE FROM dead WHERE id = ? AND queue = ? RETURNING keyhash, kind, data, key, priority, inserted_at,
    expires_at, format, trace"""
# The waiting entry keeps its data, which is newer than the letter's. An entry with an expired lease counts as waiting;
# its worker loses it, because the token is cleared.
_MERGE = """UPDATE entry INDEXED BY {} SET timeouts = 0, inserted_at = ?1, priority = min(priority, ?2), token = NULL,
    expires_at = max(expires_at, ?3), process_at = max(process_at, ?6)
    WHERE queue = ?4 AND {} AND key IS NOT NULL AND keyhash = ?5 AND expires_at > ?6"""
_MERGES = (
    _MERGE.format("entry_waiting", "status = 'W'"),
    _MERGE.format("entry_held", "status = 'P' AND +lease_until = 0"),
)
_NEWEST_HELD = """SELECT kind, data, format, trace FROM entry INDEXED BY entry_held
    WHERE queue = ? AND status = 'P' AND key IS NOT NULL AND keyhash = ? ORDER BY id DESC LIMIT 1"""

LETTERS = """SELECT d.id, q.name, d.raised_at, d.reason, d.key, d.priority, d.timeouts, d.inserted_at, d.expires_at,
    d.kind, d.data FROM dead AS d JOIN queue AS q ON q.id = d.queue"""
_ANNOUNCEABLE = "d.announced_at IS NULL AND d.reserved_until <= ?"


def retry_all(session: WriteTransaction, now_ms: int, queue: QueueRef, ids: Sequence[int]) -> int:
    return sum(_retry(session, now_ms, queue, id) for id in ids)


def _retry(session: WriteTransaction, now_ms: int, queue: QueueRef, id: int) -> bool:
    """Put a dead letter back to wait from now on, with the data of a newer entry of its key if there is one."""
    execute = session.connection.execute
    rows: list[Any] = execute(_TAKE, (id, queue.id)).fetchall()
    if not rows:
        return False
    keyhash, kind, data, key, priority, inserted_at, expires_at, format, trace = rows[0]
    if expires_at <= now_ms:  # otherwise it would never be claimed
        expires_at = NEVER_MS
    session.channels.add(channel_of(queue.id))
    if key is not None:
        for merge in _MERGES:
            execute(merge, (inserted_at, priority, expires_at, queue.id, keyhash, now_ms))
            if session.connection.changes():
                return True
        held: Any = execute(_NEWEST_HELD, (queue.id, keyhash)).fetchone()
        kind, data, format, trace = held or (kind, data, format, trace)
    entry = NewEntry(keyhash, kind, data, key, priority, None, expires_at, trace)
    insert(session.connection, now_ms, msgspec.structs.replace(queue, format=format), [entry], inserted_at)
    return True


def drop_all(session: WriteTransaction, now_ms: int, queue: QueueRef, ids: Sequence[int]) -> int:
    sql = "DELETE FROM dead WHERE queue = ? AND id IN (SELECT value FROM json_each(?))"
    session.connection.execute(sql, (queue.id, msgspec.json.encode(list(ids)).decode()))
    return session.connection.changes()


def edit(session: WriteTransaction, now_ms: int, queue: QueueRef, id: int, kind: int, data: bytes) -> bool:
    sql = "UPDATE dead SET kind = ?, data = ?, format = ? WHERE id = ? AND queue = ?"
    session.connection.execute(sql, (kind, data, queue.format, id, queue.id))
    return session.connection.changes() > 0


def unannounced(session: WriteTransaction, now_ms: int, limit: int, hold_ms: int) -> list[DeadLetterRow]:
    """Return dead letters that are neither reported nor reserved, oldest first, and reserve them for the caller."""
    sql = f"{LETTERS} WHERE {_ANNOUNCEABLE} ORDER BY d.id LIMIT ?"
    found = [DeadLetterRow(*row) for row in session.connection.execute(sql, (now_ms, limit))]
    _update_all(session, "reserved_until", now_ms + hold_ms, [letter.id for letter in found])
    return found


def announced(session: WriteTransaction, now_ms: int, ids: Sequence[int]) -> None:
    _update_all(session, "announced_at", now_ms, ids)


def any_unannounced(connection: apsw.Connection, now_ms: int) -> bool:
    """Return whether a dead letter is neither reported nor reserved."""
    sql = f"SELECT 1 FROM dead AS d INDEXED BY dead_to_announce WHERE {_ANNOUNCEABLE} LIMIT 1"
    return connection.execute(sql, (now_ms,)).fetchone() is not None


def newest(connection: apsw.Connection, queue: QueueRef | None, limit: int) -> list[DeadLetterRow]:
    where, parameters = ("", (limit,)) if queue is None else ("WHERE d.queue = ?", (queue.id, limit))
    rows = connection.execute(f"{LETTERS} {where} ORDER BY d.id DESC LIMIT ?", parameters)
    return [DeadLetterRow(*row) for row in rows]


def _update_all(session: WriteTransaction, column: str, date_ms: int, ids: Sequence[int]) -> None:
    sql = f"UPDATE dead SET {column} = ? WHERE id IN (SELECT value FROM json_each(?))"
    session.connection.execute(sql, (date_ms, msgspec.json.encode(list(ids)).decode()))
