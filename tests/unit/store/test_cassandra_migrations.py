"""The schema's lock outlasts the changes that it guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("acsylla")

from tidebook.core.errors import Unavailable
from tidebook.store.cassandra import migrations
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.migrations import LOCK_S, Migration, migrate, use_keyspace
from tidebook.store.cassandra.session import SCHEMA_TIMEOUT_S
from tidebook.store.cassandra.settings import CassandraSettings

NODES = [("host-2", "10.0.0.2", "dc1"), ("host-1", "10.0.0.1", "dc1"), ("host-0", "10.9.0.9", "dc2")]
BOTH_TABLES = ("setting", "locks")


class Keyspace:
    """A session that records calls, may lose its lock, and reaches another node with every query."""

    def __init__(
        self, *tables: str, lost_after: int = 10**9, versions: Sequence[Sequence[str]] = (), local_dc: str | None = None
    ) -> None:
        self.done: list[str] = []
        self.addresses: list[str | None] = []
        self.local_dc = local_dc
        self._tables = tables
        self._renewals_left = lost_after
        #: The versions that the nodes have, look by look, and the last one for ever.
        self._versions = list(versions)
        self._queries = 0

    async def query(self, text: str) -> list[tuple[str, ...]]:
        self._queries += 1
        if "system_schema.tables" in text:
            return [(name,) for name in self._tables]
        if "system_schema.keyspaces" in text:
            made = any(each.startswith("CREATE KEYSPACE") for each in self.done)
            return [({"class": "SimpleStrategy", "replication_factor": "3"},)] if made else []  # type: ignore[list-item]
        if text == "SELECT peer FROM system.peers":
            return [("10.0.0.1",), ("10.9.0.9",)]
        versions = self._versions[0] if self._versions else ["v"] * len(NODES)
        nodes = [(*node, version) for node, version in zip(NODES, versions, strict=True)]
        answering = self._queries % len(nodes)
        if text.endswith("system.local"):
            return [nodes[answering]]
        assert text.endswith("system.peers")
        if len(self._versions) > 1:
            self._versions.pop(0)
        return [node for i, node in enumerate(nodes) if i != answering]

    async def use(self, keyspace: str) -> None:
        self.done.append(f"use {keyspace}")

    async def read_serial(self, *_: Any) -> Keyspace:
        return self

    def first(self) -> None:
        return None

    async def define(self, ddl: str, *, address: str | None = None) -> None:
        self.done.append(ddl)
        self.addresses.append(address)

    async def compare_and_set(self, statement: str, _: Sequence[Any]) -> dict[str, bool]:
        if statement == cql.LOCK:
            self.done.append("lock")
        if statement == cql.RENEW_LOCK:
            self.done.append("renew")
            self._renewals_left -= 1
            return {"[applied]": self._renewals_left >= 0}
        return {"[applied]": True}


async def test_the_lock_is_renewed_before_each_statement() -> None:
    keyspace = Keyspace(*BOTH_TABLES)
    await migrate(keyspace, "k", [Migration("first", ("A", "B", "C"))])  # type: ignore[arg-type]
    assert keyspace.done == ["lock", "renew", "A", "renew", "B", "renew", "C", "renew"]
    assert LOCK_S > SCHEMA_TIMEOUT_S


async def test_a_process_that_lost_the_lock_changes_nothing_more() -> None:
    keyspace = Keyspace(*BOTH_TABLES, lost_after=1)
    with pytest.raises(Unavailable, match="lost"):
        await migrate(keyspace, "k", [Migration("first", ("A", "B"))])  # type: ignore[arg-type]
    assert keyspace.done == ["lock", "renew", "A", "renew"]


async def test_only_the_table_of_the_lock_is_created_without_the_lock() -> None:
    keyspace = Keyspace()
    await migrate(keyspace, "k", [Migration("first", ("A",))])  # type: ignore[arg-type]
    locks, lock, renew, setting, *_ = keyspace.done
    assert ("CREATE TABLE IF NOT EXISTS locks" in locks, lock, renew) == (True, "lock", "renew")
    assert "CREATE TABLE IF NOT EXISTS setting" in setting
    assert keyspace.done[4:] == ["renew", "A", "renew"]


async def test_every_process_uses_the_same_node_for_ddl_without_the_lock() -> None:
    settings = CassandraSettings.read("cassandra://one/books", environment={})
    for local_dc, address in ((None, "10.9.0.9"), ("dc1", "10.0.0.1")):
        for queries_before in range(len(NODES)):  # whichever node a process queries
            keyspace = Keyspace(local_dc=local_dc)
            for _ in range(queries_before):
                await keyspace.query("SELECT peer FROM system.peers")
            await use_keyspace(keyspace, settings)  # type: ignore[arg-type]
            await migrate(keyspace, "books", [])  # type: ignore[arg-type]
            assert keyspace.addresses == [address, address, None]


async def test_the_lock_is_not_taken_before_the_nodes_agree_on_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "LOCK_POLL_S", 0)
    monkeypatch.setattr(migrations, "AGREEMENT_S_MAX", 0.05)
    keyspace = Keyspace(*BOTH_TABLES, versions=[["v", "v", "u"]])
    with pytest.raises(Unavailable, match=r"do not agree.*10\.0\.0\.1 has v"):
        await migrate(keyspace, "k", [Migration("first", ("A",))])  # type: ignore[arg-type]
    assert keyspace.done == []

    monkeypatch.setattr(migrations, "AGREEMENT_S_MAX", 30)
    keyspace = Keyspace(*BOTH_TABLES, versions=[["v", "v", "u"], ["v", "u", "u"], ["u", "u", "u"]])
    await migrate(keyspace, "k", [Migration("first", ("A",))])  # type: ignore[arg-type]
    assert keyspace.done == ["lock", "renew", "A", "renew"]
