"""The tables of `queue.db`."""

from __future__ import annotations

from typing import Final

from tidebook.sqlite.database import Schema

FILE: Final = "queue.db"

_TABLES = """
CREATE TABLE queue (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    settings BLOB NOT NULL,
    paused_at INTEGER
) STRICT;

CREATE TABLE declaration (
    queue INTEGER NOT NULL REFERENCES queue,
    format INTEGER NOT NULL,
    fields BLOB NOT NULL,
    declared_at INTEGER NOT NULL,
    PRIMARY KEY (queue, format)
) STRICT, WITHOUT ROWID;

-- lease_until: 0 if the lease expired and was counted. serial: 1 while the entry holds its key exclusively, else null.
-- trace: the trace context of the put.
CREATE TABLE entry (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue INTEGER NOT NULL,
    keyhash BLOB NOT NULL,
    status TEXT NOT NULL DEFAULT 'W',
    priority INTEGER NOT NULL,
    process_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    inserted_at INTEGER NOT NULL,
    timeouts INTEGER NOT NULL DEFAULT 0,
    format INTEGER NOT NULL DEFAULT 0,
    kind INTEGER NOT NULL,
    serial INTEGER,
    started_at INTEGER,
    lease_until INTEGER,
    token BLOB,
    trace TEXT,
    key TEXT,
    data BLOB NOT NULL
) STRICT;
-- Entries without a key are never merged, so the indexes by key leave them out.
CREATE UNIQUE INDEX entry_waiting ON entry (queue, keyhash) WHERE status = 'W' AND key IS NOT NULL;
CREATE UNIQUE INDEX entry_held ON entry (queue, keyhash, serial) WHERE status = 'P' AND key IS NOT NULL;
CREATE INDEX entry_order ON entry (queue, priority, process_at, id) WHERE status = 'W';
CREATE INDEX entry_lease ON entry (queue, lease_until) WHERE status = 'P';
CREATE INDEX entry_expiry ON entry (queue, expires_at) WHERE status = 'W' AND expires_at < 9223372036854775807;

-- reserved_until: until then one process has reserved the dead letter, to run its hooks.
CREATE TABLE dead (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue INTEGER NOT NULL,
    raised_at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    keyhash BLOB NOT NULL,
    key TEXT,
    priority INTEGER NOT NULL,
    timeouts INTEGER NOT NULL,
    inserted_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    format INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    announced_at INTEGER,
    reserved_until INTEGER NOT NULL DEFAULT 0,
    trace TEXT,
    data BLOB NOT NULL
) STRICT;
CREATE INDEX dead_by_queue ON dead (queue, id);
CREATE INDEX dead_to_announce ON dead (id) WHERE announced_at IS NULL;

-- The workers of all processes, as they last reported themselves.
CREATE TABLE worker (
    queue INTEGER NOT NULL,
    id BLOB NOT NULL,
    name TEXT NOT NULL,
    concurrency INTEGER NOT NULL,
    running INTEGER NOT NULL,
    done INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    reported_at INTEGER NOT NULL,
    PRIMARY KEY (queue, id)
) STRICT, WITHOUT ROWID;

-- The feed mark of each part of a source.
CREATE TABLE mark (
    queue INTEGER NOT NULL,
    source TEXT NOT NULL,
    part INTEGER NOT NULL,
    place TEXT NOT NULL,
    PRIMARY KEY (queue, source, part)
) STRICT, WITHOUT ROWID;
"""

SCHEMA: Final = Schema("work queues", 0x7462_5155, (_TABLES,))


def channel_of(queue: int) -> str:
    """Return the wake-up channel of a queue."""
    return f"queue/{queue}"
