"""The tables of `log.db`."""

from __future__ import annotations

from typing import Final

from tidebook.sqlite.schema import Schema

FILE: Final = "log.db"

SCHEMA: Final = Schema(
    name="log",
    application_id=0x7B10_0001,
    steps=(
        """
        CREATE TABLE topic (
            topic_id TEXT NOT NULL PRIMARY KEY,
            name TEXT NOT NULL UNIQUE,
            partitions INTEGER NOT NULL,
            limit_bytes INTEGER
        ) WITHOUT ROWID;

        -- next_offset is stored, not derived: after a truncation there may be no record to derive it from.
        -- Records below start_offset are truncated; those from swept_to on may not be deleted yet.
        -- A partition whose topic_id is NULL belongs to a deleted topic; it is deleted once it is swept.
        CREATE TABLE partition (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            topic_id TEXT REFERENCES topic (topic_id),
            number INTEGER NOT NULL,
            start_offset INTEGER NOT NULL DEFAULT 0,
            next_offset INTEGER NOT NULL DEFAULT 0,
            swept_to INTEGER NOT NULL DEFAULT 0,
            indexed_to INTEGER NOT NULL DEFAULT 0,
            time_ms INTEGER NOT NULL DEFAULT 0,
            recent BLOB NOT NULL DEFAULT x'',
            UNIQUE (topic_id, number)
        );
        CREATE INDEX partition_to_sweep ON partition (id) WHERE swept_to < start_offset OR topic_id IS NULL;

        -- Records of one partition that were appended together, packed. Chunks are in the order of all appends, so that
        -- every commit writes to the end of the table. place: the row key of the first record, see `partition_base`.
        CREATE TABLE chunk (
            id INTEGER PRIMARY KEY,
            place INTEGER NOT NULL,
            time_ms INTEGER NOT NULL,
            body BLOB NOT NULL
        );

        -- The chunks of a partition, several per row; the latest ones are listed in the partition's row (recent).
        -- id: the place of the first chunk.
        CREATE TABLE directory (
            id INTEGER PRIMARY KEY,
            entries BLOB NOT NULL
        );

        -- The index by key of `count` consecutive records below the partition's indexed_to.
        -- id: the row key of the first record.
        CREATE TABLE key_run (
            id INTEGER PRIMARY KEY,
            count INTEGER NOT NULL,
            entries BLOB NOT NULL
        );
        """,
    ),
)
