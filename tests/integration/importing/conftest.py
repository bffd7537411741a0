"""Fixtures: a keyspace with kafka-journal's tables, and a PostgreSQL database with those of Deimos."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from tests.integration.importing.source_tables import DEIMOS, KafkaJournal
from tests.integration.outbox.databases import Database, postgres_database
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra.session import connect
from tidebook.store.cassandra.settings import CassandraSettings


@pytest.fixture
async def source(cassandra_address: str) -> AsyncIterator[KafkaJournal]:
    keyspace = f"kj_{uuid.uuid4().hex[:12]}"
    session = await connect(CassandraSettings.read(f"cassandra://{cassandra_address}/{keyspace}"), Metrics())
    tables = KafkaJournal(session, keyspace)
    try:
        await tables.create()
        yield tables
        await tables.drop()
    finally:
        await session.close()


@pytest.fixture
def deimos(postgres_url: str) -> Iterator[Database]:
    with postgres_database(postgres_url) as database:
        with psycopg.connect(database.url, autocommit=True) as connection:
            connection.execute(DEIMOS)
        yield database
