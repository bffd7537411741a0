"""Create tables and write rows as kafka-journal and Deimos do."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

from tidebook.store.cassandra.mutations import CqlStatement
from tidebook.store.cassandra.session import CassandraSession

JOURNAL = """
CREATE TABLE {keyspace}.journal (
    id text, topic text, segment bigint, seq_nr bigint, partition int, offset bigint, timestamp timestamp,
    origin text, version text, meta_record_id uuid, tags set<text>, metadata text, payload_type text,
    payload_txt text, payload_bin blob, headers map<text, text>,
    PRIMARY KEY ((id, topic, segment), seq_nr, timestamp))"""
METAJOURNAL = """
CREATE TABLE {keyspace}.metajournal (
    id text, topic text, segment bigint, partition int, offset bigint, segment_size int, seq_nr bigint,
    delete_to bigint, created timestamp, created_date date, updated timestamp, expire_after duration,
    expire_on date, record_id uuid, origin text, properties map<text, text>, metadata text,
    PRIMARY KEY ((topic, segment), id))"""
POINTER = """
CREATE TABLE {keyspace}.pointer2 (
    topic text, partition int, offset bigint, created timestamp, updated timestamp,
    PRIMARY KEY ((topic, partition)))"""

DEIMOS = """
CREATE TABLE kafka_messages (
    id bigserial PRIMARY KEY, topic varchar NOT NULL, message bytea, key bytea, partition_key varchar,
    created_at timestamp(6) NOT NULL DEFAULT now(), updated_at timestamp(6) NOT NULL DEFAULT now());
CREATE INDEX index_kafka_messages_on_topic_and_id ON kafka_messages (topic, id);
CREATE TABLE kafka_topic_info (
    id bigserial PRIMARY KEY, topic varchar NOT NULL, locked_by varchar, locked_at timestamp(6),
    error boolean NOT NULL DEFAULT false, retries integer NOT NULL DEFAULT 0, last_processed_at timestamp(6));
CREATE UNIQUE INDEX index_kafka_topic_info_on_topic ON kafka_topic_info (topic);
"""
#: The number of segments of `metajournal`, and the "hash" of an id, as kafka-journal calls it.
SEGMENTS = 10_000


def java_hash(text: str) -> int:
    """Return what Java's `String.hashCode` returns for characters of the basic plane."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


class KafkaJournal:
    """Writes rows as kafka-journal's replicator does."""

    def __init__(self, session: CassandraSession, keyspace: str) -> None:
        self.session = session
        self.keyspace = keyspace

    async def create(self) -> None:
        await self.session.define(
            f"CREATE KEYSPACE {self.keyspace} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 1}}"
        )
        for table in (JOURNAL, METAJOURNAL, POINTER):
            await self.session.define(table.format(keyspace=self.keyspace))

    async def drop(self) -> None:
        await self.session.define(f"DROP KEYSPACE IF EXISTS {self.keyspace}")

    async def insert(self, table: str, row: dict[str, Any]) -> None:
        given = {name: value for name, value in row.items() if value is not None}
        marks = ", ".join("?" * len(given))
        cql = f"INSERT INTO {self.keyspace}.{table} ({', '.join(given)}) VALUES ({marks})"
        await self.session.write_once(CqlStatement(cql, [*given.values()]))

    async def head(
        self,
        topic: str,
        id: str,
        seq_nr: int,
        *,
        delete_to: int | None = None,
        segment_size: int = 5,
        expire_after: timedelta | None = None,
        expire_on: date | None = None,
        record_id: uuid.UUID | None = None,
    ) -> None:
        now = datetime.now(UTC)
        row = {
            "topic": topic, "id": id, "segment": abs(java_hash(id.lower()) % SEGMENTS), "partition": 0, "offset": 7,
            "segment_size": segment_size, "seq_nr": seq_nr, "delete_to": delete_to, "created": now,
            "created_date": now.date(), "updated": now, "expire_on": expire_on,
            "record_id": None if record_id is None else str(record_id), "origin": "host-1",
        }  # fmt: skip
        await self.insert("metajournal", row)
        if expire_after is not None:
            where = f"topic = '{topic}' AND segment = {row['segment']} AND id = '{id}'"
            seconds = int(expire_after.total_seconds())
            await self.session.query(f"UPDATE {self.keyspace}.metajournal SET expire_after = {seconds}s WHERE {where}")

    async def event(
        self,
        topic: str,
        id: str,
        seq_nr: int,
        payload: Any = None,
        *,
        kind: str | None = "text",
        offset: int = 0,
        segment_size: int = 5,
        tags: Iterable[str] = (),
        record_id: uuid.UUID | None = None,
        at_ms: int = 1_700_000_000_000,
        **more: Any,
    ) -> None:
        binary = kind == "binary"
        await self.insert(
            "journal",
            {
                "id": id, "topic": topic, "segment": (seq_nr - 1) // segment_size, "seq_nr": seq_nr, "partition": 0,
                "offset": offset, "timestamp": datetime.fromtimestamp((at_ms + seq_nr) / 1000, UTC),
                "tags": {*tags}, "payload_type": kind, "payload_txt": None if binary else payload,
                "payload_bin": payload if binary else None,
                "meta_record_id": None if record_id is None else str(record_id), **more,
            },
        )  # fmt: skip

    async def journal(self, topic: str, id: str, numbers: Iterable[int], **head: Any) -> None:
        """Write a journal with these numbers, one text event per Kafka record."""
        last = 0
        for last in numbers:
            await self.event(topic, id, last, f"{id}-{last}", offset=last, segment_size=head.get("segment_size", 5))
        await self.head(topic, id, max(last, head.get("delete_to") or 0), **head)
