"""The tables of `log.db`."""

from __future__ import annotations

from typing import Final

from tidebook.sqlite.database import Schema

FILE: Final = "log.db"

SCHEMA: Final = Schema(
    name="log",
    application_id=0x7B10_0001,
    # Each record of a commit changes another page of the index by key, so small pages make commits cheaper.
    page_bytes=1_024,
    steps=(
        """
        CREATE TABLE topic (
            name TEXT NOT NULL PRIMARY KEY,
            topic_id TEXT NOT NULL,
            partitions INTEGER NOT NULL,
            limit_bytes INTEGER
        ) WITHOUT ROWID;

        -- next_offset is stored, not derived: after a truncation there may be no record to derive it from.
        -- Records below start_offset are truncated; those from swept_to on may not be deleted yet.
        -- A partition whose topic is NULL belongs to a deleted topic; it is deleted once it is swept.
        CREATE TABLE partition (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            topic TEXT REFERENCES topic (name),
            number INTEGER NOT NULL,
            start_offset INTEGER NOT NULL DEFAULT 0,
            next_offset INTEGER NOT NULL DEFAULT 0,
            swept_to INTEGER NOT NULL DEFAULT 0,
            time_ms INTEGER NOT NULL DEFAULT 0,
            UNIQUE (topic, number)
        );
        CREATE INDEX partition_to_sweep ON partition (id) WHERE swept_to < start_offset OR topic IS NULL;

        -- id: the partition's id in the upper bits, the offset in the lower 40, see `first_row`.
        -- An index entry ends with the row's id: the records of a key in a range of offsets are one range of entries.
        CREATE TABLE record (
            id INTEGER PRIMARY KEY,
            time_ms INTEGER NOT NULL,
            key BLOB,
            value BLOB NOT NULL,
            headers BLOB
        );
        CREATE INDEX record_by_key ON record (key) WHERE key IS NOT NULL;
        """,
    ),
)


def first_row(partition_id: int) -> int:
    """Return the row id of a partition's offset 0, to which offsets are added. Partitions have disjoint ranges."""
    return partition_id << 40
