"""The store's contract on a real Cassandra."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings, CassandraStore, open_cassandra_store
from tidebook.testing.conformance.store import StoreContract
from tidebook.testing.conformance.store_suite import OpenStore

pytestmark = pytest.mark.cassandra


class TestCassandraStore(StoreContract):
    last_write_wins = True

    @pytest.fixture
    async def open_store(self, cassandra_address: str) -> AsyncIterator[OpenStore]:
        settings = CassandraSettings.read(f"cassandra://{cassandra_address}/store_contract")
        opened: list[CassandraStore] = []

        async def open_one() -> CassandraStore:
            opened.append(await open_cassandra_store(settings, metrics=Metrics()))
            return opened[-1]

        yield open_one
        for store in opened:
            await store.close()
