"""The tables of `store.db`."""

from __future__ import annotations

from typing import Final

from tidebook.sqlite.database import Schema

FILE: Final = "store.db"

SCHEMA: Final = Schema(
    name="store",
    application_id=0x7B10_0002,
    steps=(
        """
        -- live and expires_at_ms repeat values of the head, for the queries over all heads.
        CREATE TABLE metajournal (
            topic TEXT NOT NULL,
            id TEXT NOT NULL,
            live INTEGER NOT NULL,
            expires_at_ms INTEGER,
            head BLOB NOT NULL,
            PRIMARY KEY (topic, id)
        ) WITHOUT ROWID;
        CREATE INDEX metajournal_expiring ON metajournal (topic, expires_at_ms, id) WHERE expires_at_ms IS NOT NULL;

        CREATE TABLE journal (
            topic TEXT NOT NULL,
            id TEXT NOT NULL,
            seq_nr INTEGER NOT NULL,
            time_ms INTEGER NOT NULL,
            epoch INTEGER NOT NULL,
            "offset" INTEGER NOT NULL,
            "index" INTEGER NOT NULL,
            log_ms INTEGER NOT NULL,
            encoded BLOB NOT NULL,
            PRIMARY KEY (topic, id, seq_nr)
        ) WITHOUT ROWID;

        -- One stream per tag, ordered by the log's time, then by the position of the record in the log. A delete finds
        -- the tag rows of an event through its row in `journal`: an index of the tag rows by journal would be a third
        -- of the cost of writing a tagged event.
        CREATE TABLE tag_views (
            tag TEXT NOT NULL,
            log_ms INTEGER NOT NULL,
            topic TEXT NOT NULL,
            partition INTEGER NOT NULL,
            "offset" INTEGER NOT NULL,
            "index" INTEGER NOT NULL,
            epoch INTEGER NOT NULL,
            id TEXT NOT NULL,
            incarnation_epoch INTEGER NOT NULL,
            incarnation_offset INTEGER NOT NULL,
            tag_seq_nr INTEGER NOT NULL,
            seq_nr INTEGER NOT NULL,
            time_ms INTEGER NOT NULL,
            encoded BLOB NOT NULL,
            PRIMARY KEY (tag, log_ms, topic, partition, "offset", "index", epoch)
        ) WITHOUT ROWID;

        CREATE TABLE tag_views_progress (
            topic TEXT NOT NULL,
            id TEXT NOT NULL,
            tag TEXT NOT NULL,
            tag_seq_nr INTEGER NOT NULL,
            seq_nr INTEGER NOT NULL,
            epoch INTEGER NOT NULL,
            "offset" INTEGER NOT NULL,
            PRIMARY KEY (topic, id, tag)
        ) WITHOUT ROWID;

        CREATE TABLE pointer (
            topic TEXT NOT NULL,
            partition INTEGER NOT NULL,
            epoch INTEGER NOT NULL,
            "offset" INTEGER NOT NULL,
            time_ms INTEGER NOT NULL,
            PRIMARY KEY (topic, partition)
        ) WITHOUT ROWID;

        -- epoch and offset are the incarnation of the journal: each incarnation has its own snapshots.
        CREATE TABLE snapshot (
            topic TEXT NOT NULL,
            id TEXT NOT NULL,
            epoch INTEGER NOT NULL,
            "offset" INTEGER NOT NULL,
            seq_nr INTEGER NOT NULL,
            payload_type INTEGER NOT NULL,
            payload BLOB NOT NULL,
            time_ms INTEGER NOT NULL,
            PRIMARY KEY (topic, id, epoch, "offset", seq_nr)
        ) WITHOUT ROWID;

        CREATE TABLE topic_config (
            topic TEXT NOT NULL PRIMARY KEY,
            config BLOB NOT NULL
        ) WITHOUT ROWID;

        CREATE TABLE setting (
            name TEXT NOT NULL PRIMARY KEY,
            value TEXT NOT NULL
        ) WITHOUT ROWID;

        CREATE TABLE parked (
            topic TEXT NOT NULL,
            partition INTEGER NOT NULL,
            epoch INTEGER NOT NULL,
            "offset" INTEGER NOT NULL,
            time_ms INTEGER NOT NULL,
            id TEXT,
            reason TEXT NOT NULL,
            value BLOB NOT NULL,
            PRIMARY KEY (topic, partition, epoch, "offset")
        ) WITHOUT ROWID;
        """,
        """
        -- The stream of a topic: all its events in the order of the log. The primary key (id, seq_nr) breaks ties.
        CREATE INDEX journal_by_time ON journal (topic, log_ms, epoch, "offset");
        """,
    ),
)
