"""Puts and feed marks in SQLite, run by the writer thread; see `QueueStore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from tidebook.queue.port import NewEntry, Put, QueueRef, Step
from tidebook.queue.sqlite.expired_leases import requeue_expired
from tidebook.queue.sqlite.tables import channel_of
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.writer import WriteTransaction

_UPSERT = """INSERT INTO entry (queue, keyhash, priority, process_at, expires_at, inserted_at, format, kind, key, data,
    trace) VALUES {} ON CONFLICT (queue, keyhash) WHERE status = 'W' AND key IS NOT NULL DO UPDATE SET
    priority = min(priority, excluded.priority), process_at = max(process_at, excluded.process_at),
    expires_at = max(expires_at, excluded.expires_at), timeouts = 0, format = excluded.format, kind = excluded.kind,
    data = excluded.data, trace = excluded.trace"""
_ANY_EXPIRED = """SELECT 1 FROM entry INDEXED BY entry_expiry
    WHERE queue = ? AND status = 'W' AND expires_at < 9223372036854775807 AND expires_at <= ? LIMIT 1"""
_DROP_EXPIRED = """DELETE FROM entry INDEXED BY entry_waiting WHERE queue = ? AND status = 'W' AND key IS NOT NULL
    AND expires_at <= ? AND keyhash IN (SELECT unhex(value) FROM json_each(?))"""
_ANY_EXPIRED_LEASE = (
    "SELECT 1 FROM entry INDEXED BY entry_lease WHERE queue = ? AND status = 'P' AND lease_until = 0 LIMIT 1"
)
_COUNT_WAITING = """SELECT count(*) FROM entry INDEXED BY entry_waiting WHERE queue = ? AND status = 'W'
    AND key IS NOT NULL AND keyhash IN (SELECT unhex(value) FROM json_each(?))"""
_MOVE_MARK = "INSERT OR REPLACE INTO mark (queue, source, part, place) VALUES (?, ?, ?, ?)"

_encode = msgspec.json.Encoder().encode


def put(session: WriteTransaction, now_ms: int, queue: QueueRef, entries: Sequence[NewEntry], inserted_at: int) -> Put:
    session.channels.add(channel_of(queue.id))
    return insert(session.connection, now_ms, queue, entries, inserted_at)


def put_once(
    session: WriteTransaction,
    now_ms: int,
    queue: QueueRef,
    entries: Sequence[NewEntry],
    inserted_at: int,
    source: str,
    steps: Sequence[Step],
) -> Put | None:
    current = marks(session.connection, queue, source)
    if any(current.get(step.part) != step.before for step in steps):
        return None
    for step in steps:
        session.connection.execute(_MOVE_MARK, (queue.id, source, step.part, step.after))
    return put(session, now_ms, queue, entries, inserted_at) if entries else Put(0, 0, now_ms)


def marks(connection: apsw.Connection, queue: QueueRef, source: str) -> dict[int, str]:
    sql = "SELECT part, place FROM mark WHERE queue = ? AND source = ?"
    return dict(connection.execute(sql, (queue.id, source)).fetchall())  # type: ignore[arg-type]


def insert(
    connection: apsw.Connection, now_ms: int, queue: QueueRef, entries: Sequence[NewEntry], inserted_at: int
) -> Put:
    """Insert or merge entries, without a wake-up."""
    merged = 0
    key_hashes = [entry.keyhash.hex() for entry in entries if entry.key is not None]
    if key_hashes:
        hashes = _encode(key_hashes).decode()
        if connection.execute(_ANY_EXPIRED, (queue.id, now_ms)).fetchone() is not None:
            connection.execute(_DROP_EXPIRED, (queue.id, now_ms, hashes))
        if connection.execute(_ANY_EXPIRED_LEASE, (queue.id,)).fetchone() is not None:
            requeue_expired(connection, queue, now_ms, hashes)
        merged = connection.execute(_COUNT_WAITING, (queue.id, hashes)).get
    values: list[Any] = []
    for entry in entries:
        process_at = now_ms if entry.process_at is None else max(entry.process_at, now_ms)
        values += (queue.id, entry.keyhash, entry.priority, process_at, entry.expires_at, inserted_at)
        values += (queue.format, entry.kind, entry.key, entry.data, entry.trace)
    insert_rows(connection, _UPSERT, 11, values)
    return Put(len(entries) - merged, merged, now_ms)
