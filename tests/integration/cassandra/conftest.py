"""Fixtures of the Cassandra tests: settings for the running server, and stores that are closed afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.open_adapters import OpenCassandra, cassandra_stores
from tidebook.store.cassandra import CassandraSettings

KEYSPACE = "store_trials"


@pytest.fixture
def settings(cassandra_address: str) -> CassandraSettings:
    return CassandraSettings.read(f"cassandra://{cassandra_address}/{KEYSPACE}")


@pytest.fixture
async def open_store(settings: CassandraSettings) -> AsyncIterator[OpenCassandra]:
    async with cassandra_stores(settings) as open_store:
        yield open_store
