"""The schema's lock outlasts the changes that it guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("acsylla")

from tidebook.core.errors import InvalidInput, OutcomeUnknown, Unavailable, UnknownVersion
from tidebook.store.cassandra import migrations
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.migrations import LOCK_S, Migration, is_created, migrate, use_keyspace
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
        #: The nodes' schema versions at each query; the last one is returned for ever.
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


async def test_a_process_that_lost_the_lock_makes_no_further_change() -> None:
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
        for queries_before in range(len(NODES)):  # whichever node the next query reaches
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


class Opened(Keyspace):
    """A keyspace with a version, whose lock other processes hold for some attempts."""

    def __init__(
        self, version: int | None, *, held: Sequence[dict[str, Any] | OutcomeUnknown] = (), **given: Any
    ) -> None:
        super().__init__(*BOTH_TABLES, **given)
        self.version = version
        self._held = list(held)
        self.applied = True
        self.swaps: list[tuple[str, list[Any]]] = []

    async def query(self, text: str) -> list[tuple[str, ...]]:
        if text.startswith("SELECT value FROM k.setting"):
            return [] if self.version is None else [(str(self.version),)]
        return await super().query(text)

    def first(self) -> Any:
        return None if self.version is None else self

    def as_tuple(self) -> tuple[str]:
        return (str(self.version),)

    async def compare_and_set(self, statement: str, values: Sequence[Any]) -> dict[str, Any]:
        if statement == cql.LOCK and self._held:
            held = self._held.pop(0)
            if isinstance(held, OutcomeUnknown):
                raise held
            return {"[applied]": False, "holder": values[1] if held["holder"] == "own" else held["holder"]}
        if statement in (cql.NEW_SETTING, cql.CHANGE_SETTING):
            self.swaps.append((statement, list(values)))
            return {"[applied]": self.applied}
        if statement == cql.UNLOCK:
            self.done.append("unlock")
        return await super().compare_and_set(statement, values)


SCHEMA = [Migration("first", ("A",)), Migration("second", ("B",)), Migration("third", ("C",))]


@pytest.mark.parametrize("version", [None, 1, 2])
async def test_only_later_migrations_run_and_each_raises_the_version_by_one(version: int | None) -> None:
    keyspace = Opened(version)
    await migrate(keyspace, "k", SCHEMA)  # type: ignore[arg-type]
    begun = version or 0
    assert [each for each in keyspace.done if each in "ABC"] == ["A", "B", "C"][begun:]
    assert keyspace.done[-1] == "unlock"
    name, setting = migrations.SCHEMA, migrations.VERSION
    assert keyspace.swaps == [
        (cql.NEW_SETTING, [name, setting, "1"]) if number == 1
        else (cql.CHANGE_SETTING, [str(number), name, setting, str(number - 1)])
        for number in range(begun + 1, 4)
    ]  # fmt: skip


async def test_a_schema_of_this_version_is_not_changed_and_a_newer_one_is_refused() -> None:
    keyspace = Opened(3)
    await migrate(keyspace, "k", SCHEMA)  # type: ignore[arg-type]
    assert (keyspace.done, keyspace.swaps) == ([], [])
    with pytest.raises(UnknownVersion) as caught:
        await migrate(Opened(4), "k", SCHEMA)  # type: ignore[arg-type]
    assert (caught.value.version, caught.value.known) == (4, 3)


async def test_a_version_that_another_process_changed_meanwhile_is_not_overwritten() -> None:
    keyspace = Opened(1)
    keyspace.applied = False
    with pytest.raises(OutcomeUnknown, match="migration 2"):
        await migrate(keyspace, "k", SCHEMA)  # type: ignore[arg-type]
    assert "C" not in keyspace.done
    assert keyspace.done[-1] == "unlock"


@pytest.mark.parametrize("held", [{"holder": "another"}, OutcomeUnknown("no answer")], ids=["held", "unknown"])
async def test_a_held_lock_is_awaited(monkeypatch: pytest.MonkeyPatch, held: Any) -> None:
    monkeypatch.setattr(migrations, "LOCK_POLL_S", 0)
    keyspace = Opened(2, held=[held, held, {"holder": "own"}])
    await migrate(keyspace, "k", SCHEMA)  # type: ignore[arg-type]
    assert [each for each in keyspace.done if each in "ABC"] == ["C"]
    monkeypatch.setattr(migrations, "LOCK_WAIT_S_MAX", -1)
    with pytest.raises(Unavailable, match="held the schema's lock"):
        await migrate(Opened(2, held=[held] * 3), "k", SCHEMA)  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "created"), [(None, False), (1, True), (3, True)])
async def test_a_schema_without_a_version_is_not_created(version: int | None, created: bool) -> None:
    assert await is_created(Opened(version), "k") is created  # type: ignore[arg-type]
    assert await is_created(Keyspace(), "k") is False  # type: ignore[arg-type]
    assert await is_created(Keyspace("locks"), "k") is False  # type: ignore[arg-type]


async def test_a_failed_statement_names_its_migration_and_leaves_the_version() -> None:
    class Failing(Opened):
        async def define(self, ddl: str, *, address: str | None = None) -> None:
            raise Unavailable("the node is down")

    keyspace = Failing(1)
    with pytest.raises(Unavailable) as caught:
        await migrate(keyspace, "k", SCHEMA)  # type: ignore[arg-type]
    [note] = caught.value.__notes__
    assert "migration 2 (second)" in note
    assert "stays 1" in note
    assert keyspace.swaps == []


@pytest.mark.parametrize(
    ("options", "replicas"),
    [({}, "'replication_factor': 3"), ({"replication": 1}, "'replication_factor': 1"),
     ({"replication": {"dc1": 3, "dc2": 2}}, "'dc1': 3, 'dc2': 2")],
)  # fmt: skip
async def test_a_keyspace_is_created_with_as_many_replicas_as_there_are_nodes_up_to_three(
    options: dict[str, Any], replicas: str
) -> None:
    keyspace = Keyspace(*BOTH_TABLES)
    await use_keyspace(keyspace, CassandraSettings.read("cassandra://one/books", options, environment={}))  # type: ignore[arg-type]
    assert replicas in keyspace.done[0]
    assert keyspace.done[-1] == "use books"
    with pytest.raises(InvalidInput, match="create_keyspace is off"):
        await use_keyspace(
            Keyspace(), CassandraSettings.read("cassandra://one/books", {"create_keyspace": False}, environment={})  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(InvalidInput, match="can miss"):
        await use_keyspace(
            keyspace, CassandraSettings.read("cassandra://one/books", {"consistency": "ONE"}, environment={})  # type: ignore[arg-type]
        )  # fmt: skip
