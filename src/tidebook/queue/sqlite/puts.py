"""Puts in SQLite, run by the writer thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from tidebook.queue.port import NewEntry, Put, QueueRef
from tidebook.queue.sqlite.expired_leases import requeue_expired
from tidebook.queue.sqlite.tables import channel_of
from tidebook.runtime.clock import Clock
from tidebook.sqlite.multi_insert import insert_rows
from tidebook.sqlite.writer import WriteTransaction

_UPSERT = """INSERT INTO entry (queue, keyhash, priority, process_at, expires_at, inserted_at, format, kind, key, data)
    VALUES {} ON CONFLICT (queue, keyhash) WHERE status = 'W' AND key IS NOT NULL DO UPDATE SET
    priority = min(priority, excluded.priority), process_at = max(process_at, excluded.process_at),
    expires_at = max(expires_at, excluded.expires_at), timeouts = 0, format = excluded.format, kind = excluded.kind,
    data = excluded.data"""
_ANY_EXPIRED = """SELECT 1 FROM entry INDEXED BY entry_expiry
    WHERE queue = ? AND status = 'W' AND expires_at < 9223372036854775807 AND expires_at <= ? LIMIT 1"""
_DROP_EXPIRED = """DELETE FROM entry INDEXED BY entry_waiting WHERE queue = ? AND status = 'W' AND key IS NOT NULL
    AND expires_at <= ? AND keyhash IN (SELECT unhex(value) FROM json_each(?))"""
_ANY_EXPIRED_LEASE = (
    "SELECT 1 FROM entry INDEXED BY entry_lease WHERE queue = ? AND status = 'P' AND lease_until = 0 LIMIT 1"
)
_COUNT_WAITING = """SELECT count(*) FROM entry INDEXED BY entry_waiting WHERE queue = ? AND status = 'W'
    AND key IS NOT NULL AND keyhash IN (SELECT unhex(value) FROM json_each(?))"""

_encode = msgspec.json.Encoder().encode


class NewEntries(msgspec.Struct, frozen=True, gc=False):
    """The arguments of one put."""

    queue: QueueRef
    entries: Sequence[NewEntry]
    inserted_at: int


class Puts:
    """Adds entries; merges an entry whose key is already waiting into the waiting one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, session: WriteTransaction, calls: Sequence[NewEntries]) -> list[Put]:
        """Put the entries of each call, all or none."""
        return [self._put(session, call) for call in calls]

    def _put(self, session: WriteTransaction, call: NewEntries) -> Put:
        now_ms = self._clock.now_ms()
        put = insert(session.connection, call, now_ms)
        session.channels.add(channel_of(call.queue.id))
        return put


def insert(connection: apsw.Connection, call: NewEntries, now_ms: int) -> Put:
    """Insert or merge the entries of a call."""
    queue, merged = call.queue, 0
    key_hashes = [entry.keyhash.hex() for entry in call.entries if entry.key is not None]
    if key_hashes:
        hashes = _encode(key_hashes).decode()
        if connection.execute(_ANY_EXPIRED, (queue.id, now_ms)).fetchone() is not None:
            connection.execute(_DROP_EXPIRED, (queue.id, now_ms, hashes))
        if connection.execute(_ANY_EXPIRED_LEASE, (queue.id,)).fetchone() is not None:
            requeue_expired(connection, queue, now_ms, hashes)
        merged = connection.execute(_COUNT_WAITING, (queue.id, hashes)).get
    values: list[Any] = []
    for entry in call.entries:
        process_at = now_ms if entry.process_at is None else max(entry.process_at, now_ms)
        values += (queue.id, entry.keyhash, entry.priority, process_at, entry.expires_at, call.inserted_at)
        values += (queue.format, entry.kind, entry.key, entry.data)
    insert_rows(connection, _UPSERT, 10, values)
    return Put(len(call.entries) - merged, merged, now_ms)
