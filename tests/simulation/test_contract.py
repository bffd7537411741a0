"""Run the store's conformance suite on the simulated cluster, without a server."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("acsylla")

from tests.simulation import cluster as clusters
from tests.simulation.cluster import Cluster
from tests.simulation.cql import AddColumn, CreateTable, DropTable, parse
from tests.simulation.simulation import Clients
from tidebook.store.cassandra import CassandraSettings, CassandraStore
from tidebook.store.cassandra.migrations import BOOTSTRAP, MIGRATIONS
from tidebook.testing.conformance.store import StoreContract
from tidebook.testing.conformance.store_suite import OpenStore


class TestSimulatedCassandraStore(StoreContract):
    last_write_wins = True

    @pytest.fixture
    def open_store(self, monkeypatch: pytest.MonkeyPatch) -> OpenStore:
        monkeypatch.setattr(clusters, "LATENCY_S", 0.0)
        cluster = Cluster(random.Random(1))
        for ddl in (*BOOTSTRAP, *(ddl for migration in MIGRATIONS for ddl in migration.statements)):
            parsed = parse(ddl)
            assert isinstance(parsed, CreateTable | DropTable | AddColumn), ddl
            cluster.define(parsed)
        clients = Clients(cluster, CassandraSettings(hosts=("simulated",), keyspace="simulated"))

        async def open_one() -> CassandraStore:
            return clients.store()

        return open_one
