"""The outbox's tables on SQLite. Times are milliseconds since 1970."""

from __future__ import annotations

NOW_MS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

# AUTOINCREMENT: an id is never reused, even after the table was empty.
_MESSAGES = f"""\
CREATE TABLE IF NOT EXISTS kafka_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    topic TEXT NOT NULL,
    "key" BLOB,
    partition_key BLOB,
    payload BLOB,
    headers BLOB,
    tries INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL DEFAULT ({NOW_MS})
)"""

_TOPIC_INFO = """\
CREATE TABLE IF NOT EXISTS kafka_topic_info (
    topic TEXT PRIMARY KEY,
    locked_by BLOB,
    locked_at INTEGER,
    owner TEXT,
    previous_owner TEXT,
    error INTEGER NOT NULL DEFAULT 0,
    retries INTEGER NOT NULL DEFAULT 0,
    retry_at INTEGER,
    reason TEXT,
    session_id BLOB,
    session_ids BLOB,
    session_at INTEGER,
    session_fence TEXT,
    topic_uuid TEXT,
    rewinds INTEGER NOT NULL DEFAULT 0,
    notice_cause TEXT,
    notice TEXT,
    notice_at INTEGER,
    relayed INTEGER NOT NULL DEFAULT 0,
    minute INTEGER NOT NULL DEFAULT 0,
    minute_relayed INTEGER NOT NULL DEFAULT 0,
    minute_before INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID"""

_TOPIC_OFFSET = """\
CREATE TABLE IF NOT EXISTS kafka_topic_offset (
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    scan_from INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) WITHOUT ROWID"""

_PARKED = f"""\
CREATE TABLE IF NOT EXISTS kafka_parked (
    topic TEXT NOT NULL,
    id INTEGER NOT NULL,
    state INTEGER NOT NULL,
    order_key BLOB,
    "key" BLOB,
    partition_key BLOB,
    payload BLOB,
    headers BLOB,
    tries INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    parked_at INTEGER NOT NULL DEFAULT ({NOW_MS}),
    retry_at INTEGER,
    reason TEXT NOT NULL,
    PRIMARY KEY (topic, id)
)"""

STATEMENTS = (
    _MESSAGES,
    "CREATE INDEX IF NOT EXISTS kafka_messages_topic ON kafka_messages (topic, id)",
    _TOPIC_INFO,
    _TOPIC_OFFSET,
    _PARKED,
    "CREATE INDEX IF NOT EXISTS kafka_parked_state ON kafka_parked (topic, state, id)",
    "CREATE INDEX IF NOT EXISTS kafka_parked_due ON kafka_parked (state, retry_at)",
    "CREATE TABLE IF NOT EXISTS kafka_outbox (one INTEGER PRIMARY KEY CHECK (one = 1), uuid BLOB NOT NULL, "
    "version INTEGER NOT NULL)",
    "INSERT OR IGNORE INTO kafka_outbox (one, uuid, version) VALUES (1, randomblob(16), 1)",
)

DROP = tuple(
    f"DROP TABLE IF EXISTS {table}"
    for table in ("kafka_messages", "kafka_topic_info", "kafka_topic_offset", "kafka_parked", "kafka_outbox")
)
