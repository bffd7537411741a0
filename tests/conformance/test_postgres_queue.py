"""Run the conformance suite of queue stores on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from tests.open_adapters import queue_schema
from tidebook.queue.port import QueueStore
from tidebook.queue.postgres.store import PostgresQueues
from tidebook.testing.conformance.queue import Advance, OpenQueues, QueueContract
from tidebook.testing.conformance.queue_base import START_MS


@pytest.fixture(scope="module")
def schema(postgres_url: str) -> Iterator[str]:
    with queue_schema(postgres_url) as name:
        yield name


@pytest.mark.postgres
class TestPostgresQueues(QueueContract):
    takes_transactions = True

    @pytest.fixture
    def open_queues(self, postgres_url: str, schema: str) -> OpenQueues:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"UPDATE {schema}.clock SET now_ms = {START_MS}")

        @asynccontextmanager
        async def open_queues() -> AsyncIterator[QueueStore]:
            now = f"(SELECT c.now_ms FROM {schema}.clock c)"
            store = await PostgresQueues.open(postgres_url, schema=schema, now=now)
            yield store
            await store.close()

        return open_queues

    @pytest.fixture
    def advance(self, postgres_url: str, schema: str) -> Advance:
        async def advance(by_ms: int) -> None:
            async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
                await connection.execute(f"UPDATE {schema}.clock SET now_ms = now_ms + {by_ms}")

        return advance
