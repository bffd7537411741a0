"""Adapters as test suites open them: each call opens another one on the same data."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tidebook.log.port import Log
from tidebook.log.sqlite import SqliteLog
from tidebook.runtime.metrics import Metrics
from tidebook.testing.conformance.log_base import OpenLog
from tidebook.testing.conformance.queue_base import START_MS

if TYPE_CHECKING:  # a run without servers may lack their drivers
    from tidebook.store.cassandra import CassandraSettings, CassandraStore

OpenCassandra = Callable[[], Awaitable["CassandraStore"]]


def kafka_logs(bootstrap: str) -> OpenLog:
    """Return a function that opens a log on a real Kafka."""
    from tidebook.log.kafka import KafkaLog, KafkaSettings

    @asynccontextmanager
    async def open_log() -> AsyncIterator[Log]:
        log = KafkaLog(KafkaSettings.read(f"kafka://{bootstrap}"), metrics=Metrics())
        try:
            yield log
        finally:
            await log.close()

    return open_log


def embedded_logs(folder: Path, wrap: Callable[[Log], Log] = lambda log: log) -> OpenLog:
    """Return a function that opens an embedded log, wrapped by `wrap`."""

    @asynccontextmanager
    async def open_log() -> AsyncIterator[Log]:
        log = SqliteLog(folder)
        yield wrap(log)
        await log.close()

    return open_log


@asynccontextmanager
async def cassandra_stores(settings: CassandraSettings) -> AsyncIterator[OpenCassandra]:
    """Yield a function that opens a store on a real Cassandra, and close all of them at the end."""
    from tidebook.store.cassandra import open_cassandra_store

    opened: list[CassandraStore] = []

    async def open_store() -> CassandraStore:
        opened.append(await open_cassandra_store(settings, metrics=Metrics()))
        return opened[-1]

    yield open_store
    for store in opened:
        await store.close()


@contextmanager
def queue_schema(postgres_url: str) -> Iterator[str]:
    """Yield a new schema of a real PostgreSQL with a table that is the queues' clock, and drop it at the end."""
    import psycopg

    name = f"queue_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        connection.execute(f"CREATE TABLE {name}.clock AS SELECT {START_MS} AS now_ms")
        yield name
        connection.execute(f"DROP SCHEMA {name} CASCADE")
