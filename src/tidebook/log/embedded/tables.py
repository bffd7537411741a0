"""The tables of `log.db`."""

from __future__ import annotations

from typing import Final

from tidebook.folder.schema import Schema

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

        -- next_offset is kept, never derived: after a truncate there may be no record to derive it from.
        -- Records below start_offset are gone; those from swept on may still take up room.
        -- A partition whose topic is NULL was deleted with it, and goes when it is swept.
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

        -- Records of one partition that were appended together, packed. They lie in the order of all appends, so that
        -- every commit writes to the end of the table. place: see `chunks.base`.
        CREATE TABLE chunk (
            id INTEGER PRIMARY KEY,
            place INTEGER NOT NULL,
            time_ms INTEGER NOT NULL,
            body BLOB NOT NULL
        );

        -- Which chunks a partition has, some to a row; the last ones are listed in its own row.
        -- id: the first one's place.
        CREATE TABLE directory (
            id INTEGER PRIMARY KEY,
            entries BLOB NOT NULL
        );

        -- Where the keys of `count` records lie, for records below the partition's indexed_to.
        -- id: the first one's place.
        CREATE TABLE key_run (
            id INTEGER PRIMARY KEY,
            count INTEGER NOT NULL,
            entries BLOB NOT NULL
        );
        """,
    ),
)
