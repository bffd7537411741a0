"""What the writer does with queues and dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.core.clock import Clock
from tidebook.folder.writer import Session
from tidebook.sql.port.queue import NEVER_MS, NewEntry, QueueRef, QueueSettings
from tidebook.sql.sqlite.queue_puts import NewEntries, channel_of, insert

_FIND = "SELECT id, name, settings FROM queue WHERE name = ?"
_DEAD = """DELETE FROM dead WHERE id = ? RETURNING queue, keyhash, kind, data, key, priority, inserted_at, expires_at,
    format"""

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(QueueSettings).decode


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """A queue by name, and the settings that it is to have."""

    name: str
    settings: QueueSettings | None


class Edit(msgspec.Struct, frozen=True, gc=False):
    """New data for a dead letter."""

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
                "SELECT format, fields FROM declaration WHERE queue = ? ORDER BY format DESC LIMIT 1", (queue,)
            ).fetchone()
            if found is None or found[1] != fields:
                number = 1 if found is None else found[0] + 1
                execute("INSERT INTO declaration VALUES (?, ?, ?, ?)", (queue, number, fields, self._clock.now_ms()))
                numbers.append(number)
            else:
                numbers.append(found[0])
        return numbers

    def retry(self, session: Session, flags: Sequence[int]) -> list[bool]:
        """Put dead letters back; they wait from now on."""
        return [self._retry(session, flag) for flag in flags]

    def _retry(self, session: Session, flag: int) -> bool:
        rows: list[Any] = session.connection.execute(_DEAD, (flag,)).fetchall()
        if not rows:
            return False
        queue, keyhash, kind, data, key, priority, inserted_at, expires_at, format = rows[0]
        now_ms = self._clock.now_ms()
        if expires_at <= now_ms:  # it would never be handed out
            expires_at = NEVER_MS
        entry = NewEntry(keyhash, kind, data, key, priority, None, expires_at)
        ref = QueueRef(queue, "", QueueSettings(), format=format)
        insert(session.connection, NewEntries(ref, [entry], inserted_at), now_ms)
        session.channels.add(channel_of(queue))
        return True

    def edit(self, session: Session, edits: Sequence[Edit]) -> list[bool]:
        """Replace their data."""
        changed = []
        for edit in edits:
            sql = "UPDATE dead SET kind = ?, data = ? WHERE id = ?"
            session.connection.execute(sql, (edit.kind, edit.data, edit.flag))
            changed.append(session.connection.changes() > 0)
        return changed

    def drop(self, session: Session, flags: Sequence[int]) -> list[bool]:
        """Delete them."""
        dropped = []
        for flag in flags:
            session.connection.execute("DELETE FROM dead WHERE id = ?", (flag,))
            dropped.append(session.connection.changes() > 0)
        return dropped

    def announced(self, session: Session, calls: Sequence[Sequence[int]]) -> list[None]:
        """Their flags were told of."""
        now_ms = self._clock.now_ms()
        for flags in calls:
            sql = "UPDATE dead SET announced_at = ? WHERE id IN (SELECT value FROM json_each(?))"
            session.connection.execute(sql, (now_ms, _encode(list(flags)).decode()))
        return [None] * len(calls)
