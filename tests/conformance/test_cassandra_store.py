"""Run the store's conformance suite on a real Cassandra."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.open_adapters import cassandra_stores
from tidebook.store.cassandra import CassandraSettings
from tidebook.testing.conformance.store import StoreContract
from tidebook.testing.conformance.store_suite import OpenStore

pytestmark = pytest.mark.cassandra


class TestCassandraStore(StoreContract):
    last_write_wins = True

    @pytest.fixture
    async def open_store(self, cassandra_address: str) -> AsyncIterator[OpenStore]:
        settings = CassandraSettings.read(f"cassandra://{cassandra_address}/store_contract")
        async with cassandra_stores(settings) as open_store:
            yield open_store
