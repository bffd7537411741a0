"""What the writer does with queues and dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.core.clock import Clock
from tidebook.folder.writer import Session
from tidebook.sql.port.queue import NEVER_MS, Flag, NewEntry, QueueRef, QueueSettings
from tidebook.sql.sqlite.queue_looks import unannounced
from tidebook.sql.sqlite.queue_puts import NewEntries, insert
from tidebook.sql.sqlite.queue_tables import channel_of

_FIND = "SELECT id, name, settings FROM queue WHERE name = ?"
_DEAD = """DELETE FROM dead WHERE id = ? AND queue = ? RETURNING keyhash, kind, data, key, priority, inserted_at,
    expires_at, format"""
# The one that waits keeps its data, which was put later than the letter's. One whose lease ran out, which was counted,
# is waiting too; who held it holds it no more.
_JOIN = """UPDATE entry INDEXED BY {} SET timeouts = 0, inserted_at = ?1, priority = min(priority, ?2), token = NULL,
    expires_at = max(expires_at, ?3), process_at = max(process_at, ?6)
    WHERE queue = ?4 AND {} AND key IS NOT NULL AND keyhash = ?5 AND expires_at > ?6"""
_JOINS = (
    _JOIN.format("entry_waiting", "status = 'W'"),
    _JOIN.format("entry_held", "status = 'P' AND +lease_until = 0"),
)
_NEWEST_HELD = """SELECT kind, data, format FROM entry INDEXED BY entry_held
    WHERE queue = ? AND status = 'P' AND key IS NOT NULL AND keyhash = ? ORDER BY id DESC LIMIT 1"""

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(QueueSettings).decode


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """A queue by name, and the settings that it is to have."""

    name: str
    settings: QueueSettings | None


class Edit(msgspec.Struct, frozen=True, gc=False):
    """New data for a dead letter."""

    queue: QueueRef
    flag: int
    kind: int
    data: bytes


def ref_of(row: tuple[int, str, bytes]) -> QueueRef:
    """A queue from its row."""
    id, name, settings = row
    return QueueRef(id, name, _decode(settings))


def open_queues(session: Session, wanted: Sequence[Wanted]) -> list[QueueRef]:
    """Make queues, or find them; settings that are given replace the ones that are kept."""
    execute = session.connection.execute
    refs = []
    for each in wanted:
        settings = _encode(each.settings or QueueSettings())
        execute("INSERT INTO queue (name, settings) VALUES (?, ?) ON CONFLICT DO NOTHING", (each.name, settings))
        if each.settings is not None:
            execute("UPDATE queue SET settings = ? WHERE name = ?", (settings, each.name))
        found: Any = execute(_FIND, (each.name,)).fetchone()
        refs.append(ref_of(found))
    return refs


class Letters:
    """Dead letters that are put back, edited or dropped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def declare(self, session: Session, declared: Sequence[tuple[int, bytes]]) -> list[int]:
        """The numbers of declarations; the same one again keeps its number."""
        execute, numbers = session.connection.execute, []
        for queue, fields in declared:
            found: Any = execute(
                "SELECT max(format), max(format) FILTER (WHERE fields = ?) FROM declaration WHERE queue = ?",
                (fields, queue),
            ).fetchone()
            newest, number = found
            if number is None:
                number = (newest or 0) + 1
                execute("INSERT INTO declaration VALUES (?, ?, ?, ?)", (queue, number, fields, self._clock.now_ms()))
            numbers.append(number)
        return numbers

    def retry(self, session: Session, flags: Sequence[tuple[QueueRef, int]]) -> list[bool]:
        """Put dead letters back; they wait from now on, with the data of a newer entry of their key if one is there."""
        return [self._retry(session, queue, flag) for queue, flag in flags]

    def _retry(self, session: Session, queue: QueueRef, flag: int) -> bool:
        rows: list[Any] = session.connection.execute(_DEAD, (flag, queue.id)).fetchall()
        if not rows:
            return False
        keyhash, kind, data, key, priority, inserted_at, expires_at, format = rows[0]
        now_ms = self._clock.now_ms()
        if expires_at <= now_ms:  # it would never be handed out
            expires_at = NEVER_MS
        session.channels.add(channel_of(queue.id))
        execute = session.connection.execute
        if key is not None:
            for join in _JOINS:
                execute(join, (inserted_at, priority, expires_at, queue.id, keyhash, now_ms))
                if session.connection.changes():
                    return True
            held: Any = execute(_NEWEST_HELD, (queue.id, keyhash)).fetchone()
            kind, data, format = held or (kind, data, format)
        entry = NewEntry(keyhash, kind, data, key, priority, None, expires_at)
        ref = msgspec.structs.replace(queue, format=format)
        insert(session.connection, NewEntries(ref, [entry], inserted_at), now_ms)
        return True

    def edit(self, session: Session, edits: Sequence[Edit]) -> list[bool]:
        """Replace their data."""
        changed = []
        for edit in edits:
            sql = "UPDATE dead SET kind = ?, data = ?, format = ? WHERE id = ? AND queue = ?"
            session.connection.execute(sql, (edit.kind, edit.data, edit.queue.format, edit.flag, edit.queue.id))
            changed.append(session.connection.changes() > 0)
        return changed

    def drop(self, session: Session, flags: Sequence[tuple[QueueRef, int]]) -> list[bool]:
        """Delete them."""
        dropped = []
        for queue, flag in flags:
            session.connection.execute("DELETE FROM dead WHERE id = ? AND queue = ?", (flag, queue.id))
            dropped.append(session.connection.changes() > 0)
        return dropped

    def unannounced(self, session: Session, calls: Sequence[tuple[int, int]]) -> list[list[Flag]]:
        """Those that nobody was told of: for a while they are the caller's alone to tell of."""
        found = []
        for limit, hold_ms in calls:
            now_ms = self._clock.now_ms()
            flags = unannounced(session.connection, now_ms, limit)
            sql = "UPDATE dead SET telling_until = ? WHERE id IN (SELECT value FROM json_each(?))"
            ids = _encode([flag.id for flag in flags]).decode()
            session.connection.execute(sql, (now_ms + hold_ms, ids))
            found.append(flags)
        return found

    def announced(self, session: Session, calls: Sequence[Sequence[int]]) -> list[None]:
        """Their flags were told of."""
        now_ms = self._clock.now_ms()
        for flags in calls:
            sql = "UPDATE dead SET announced_at = ? WHERE id IN (SELECT value FROM json_each(?))"
            session.connection.execute(sql, (now_ms, _encode(list(flags)).decode()))
        return [None] * len(calls)
