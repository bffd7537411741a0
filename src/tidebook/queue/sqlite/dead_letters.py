"""Dead letters in SQLite: retried, edited, dropped and announced by the writer thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.queue.port import NEVER_MS, DeadLetterRow, NewEntry, QueueRef
from tidebook.queue.sqlite.puts import NewEntries, insert
from tidebook.queue.sqlite.reads import unannounced
from tidebook.queue.sqlite.tables import channel_of
from tidebook.runtime.clock import Clock
from tidebook.sqlite.writer import WriteTransaction

_TAKE = """DELETE FROM dead WHERE id = ? AND queue = ? RETURNING keyhash, kind, data, key, priority, inserted_at,
    expires_at, format"""
# The waiting entry keeps its data, which is newer than the letter's. An entry with an expired lease counts as waiting;
# its worker loses it, because the token is cleared.
_MERGE = """UPDATE entry INDEXED BY {} SET timeouts = 0, inserted_at = ?1, priority = min(priority, ?2), token = NULL,
    expires_at = max(expires_at, ?3), process_at = max(process_at, ?6)
    WHERE queue = ?4 AND {} AND key IS NOT NULL AND keyhash = ?5 AND expires_at > ?6"""
_MERGES = (
    _MERGE.format("entry_waiting", "status = 'W'"),
    _MERGE.format("entry_held", "status = 'P' AND +lease_until = 0"),
)
_NEWEST_HELD = """SELECT kind, data, format FROM entry INDEXED BY entry_held
    WHERE queue = ? AND status = 'P' AND key IS NOT NULL AND keyhash = ? ORDER BY id DESC LIMIT 1"""

_encode = msgspec.json.encode


class Edit(msgspec.Struct, frozen=True, gc=False):
    """New data for a dead letter."""

    queue: QueueRef
    flag: int
    kind: int
    data: bytes


class SqliteDeadLetters:
    """Retries, edits, drops and announces dead letters."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def retry(self, session: WriteTransaction, flags: Sequence[tuple[QueueRef, int]]) -> list[bool]:
        """Put dead letters back to wait from now on, each with the data of a newer entry of its key if there is one."""
        return [self._retry(session, queue, flag) for queue, flag in flags]

    def _retry(self, session: WriteTransaction, queue: QueueRef, flag: int) -> bool:
        rows: list[Any] = session.connection.execute(_TAKE, (flag, queue.id)).fetchall()
        if not rows:
            return False
        keyhash, kind, data, key, priority, inserted_at, expires_at, format = rows[0]
        now_ms = self._clock.now_ms()
        if expires_at <= now_ms:  # otherwise it would never be claimed
            expires_at = NEVER_MS
        session.channels.add(channel_of(queue.id))
        execute = session.connection.execute
        if key is not None:
            for merge in _MERGES:
                execute(merge, (inserted_at, priority, expires_at, queue.id, keyhash, now_ms))
                if session.connection.changes():
                    return True
            held: Any = execute(_NEWEST_HELD, (queue.id, keyhash)).fetchone()
            kind, data, format = held or (kind, data, format)
        entry = NewEntry(keyhash, kind, data, key, priority, None, expires_at)
        ref = msgspec.structs.replace(queue, format=format)
        insert(session.connection, NewEntries(ref, [entry], inserted_at), now_ms)
        return True

    def edit(self, session: WriteTransaction, edits: Sequence[Edit]) -> list[bool]:
        """Replace the data of dead letters."""
        changed = []
        for edit in edits:
            sql = "UPDATE dead SET kind = ?, data = ?, format = ? WHERE id = ? AND queue = ?"
            session.connection.execute(sql, (edit.kind, edit.data, edit.queue.format, edit.flag, edit.queue.id))
            changed.append(session.connection.changes() > 0)
        return changed

    def drop(self, session: WriteTransaction, flags: Sequence[tuple[QueueRef, int]]) -> list[bool]:
        """Delete dead letters."""
        dropped = []
        for queue, flag in flags:
            session.connection.execute("DELETE FROM dead WHERE id = ? AND queue = ?", (flag, queue.id))
            dropped.append(session.connection.changes() > 0)
        return dropped

    def unannounced(self, session: WriteTransaction, calls: Sequence[tuple[int, int]]) -> list[list[DeadLetterRow]]:
        """Return dead letters that no hook has reported, and reserve them for the caller."""
        found = []
        for limit, hold_ms in calls:
            now_ms = self._clock.now_ms()
            flags = unannounced(session.connection, now_ms, limit)
            sql = "UPDATE dead SET telling_until = ? WHERE id IN (SELECT value FROM json_each(?))"
            ids = _encode([flag.id for flag in flags]).decode()
            session.connection.execute(sql, (now_ms + hold_ms, ids))
            found.append(flags)
        return found

    def announced(self, session: WriteTransaction, calls: Sequence[Sequence[int]]) -> list[None]:
        """Mark dead letters as reported."""
        now_ms = self._clock.now_ms()
        for flags in calls:
            sql = "UPDATE dead SET announced_at = ? WHERE id IN (SELECT value FROM json_each(?))"
            session.connection.execute(sql, (now_ms, _encode(list(flags)).decode()))
        return [None] * len(calls)
