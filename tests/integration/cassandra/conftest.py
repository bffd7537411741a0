"""What the Cassandra tests share: settings for the running server, and stores that are closed afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings, CassandraStore, open_cassandra_store

KEYSPACE = "store_trials"
OpenCassandra = Callable[[], Awaitable[CassandraStore]]


@pytest.fixture
def settings(cassandra_address: str) -> CassandraSettings:
    return CassandraSettings.read(f"cassandra://{cassandra_address}/{KEYSPACE}")


@pytest.fixture
async def open_store(settings: CassandraSettings) -> AsyncIterator[OpenCassandra]:
    opened: list[CassandraStore] = []

    async def open_one() -> CassandraStore:
        opened.append(await open_cassandra_store(settings, metrics=Metrics()))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()
