"""Waiting for a schema that other processes change: for how long, and what is raised then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("acsylla")

from tests.simulation.virtual_time import run_in_virtual_time as run
from tests.unit.store.test_cassandra_migrations import BOTH_TABLES, SCHEMA, Keyspace, Opened
from tidebook.core.errors import Corrupt, InvalidInput, Unavailable, UnknownVersion
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import migrations
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra import store as stores
from tidebook.store.cassandra.migrations import _retry_until_visible, is_created, migrate, use_keyspace
from tidebook.store.cassandra.settings import CassandraSettings

SETTINGS = CassandraSettings.read("cassandra://one/books", environment={})


def test_a_table_that_is_listed_and_not_usable_is_awaited_for_some_seconds() -> None:
    times_s: list[float] = []

    async def act() -> str:
        times_s.append(asyncio.get_running_loop().time())
        if len(times_s) < 4:
            raise Corrupt("no such table")
        return "found"

    assert run(lambda: _retry_until_visible(act)) == "found"
    assert times_s == pytest.approx([0.0, 0.2, 0.4, 0.6])


def test_a_table_that_never_becomes_usable_is_reported_after_ten_seconds() -> None:
    times_s: list[float] = []

    async def act() -> str:
        times_s.append(asyncio.get_running_loop().time())
        raise Corrupt("no such table")

    with pytest.raises(Corrupt):
        run(lambda: _retry_until_visible(act))
    assert migrations.VISIBLE_S_MAX < times_s[-1] <= migrations.VISIBLE_S_MAX + 2 * migrations.LOCK_POLL_S


def test_a_newer_schema_is_not_waited_for() -> None:
    calls = 0

    async def act() -> None:
        nonlocal calls
        calls += 1
        raise UnknownVersion("the keyspace", version=9, known=1)

    with pytest.raises(UnknownVersion):
        run(lambda: _retry_until_visible(act))
    assert calls == 1


def test_nodes_that_do_not_agree_are_waited_for_as_long_as_the_lease_allows() -> None:
    keyspace = Keyspace(*BOTH_TABLES, versions=[["v", "v", "u"]])
    ended_s = 0.0

    async def program() -> None:
        nonlocal ended_s
        try:
            await migrate(keyspace, "k", SCHEMA)  # type: ignore[arg-type]
        finally:
            ended_s = asyncio.get_running_loop().time()

    with pytest.raises(Unavailable, match="do not agree"):
        run(program)
    assert migrations.AGREEMENT_S_MAX < ended_s <= migrations.AGREEMENT_S_MAX + 2 * migrations.LOCK_POLL_S
    assert keyspace.done == []


def test_each_statement_waits_until_the_nodes_agree_on_the_one_before() -> None:
    class Slow(Opened):
        """The nodes agree at the second check after each change."""

        behind = False

        async def define(self, ddl: str, *, address: str | None = None) -> None:
            assert not self.behind
            self.behind = True
            await super().define(ddl, address=address)

        async def query(self, text: str) -> list[tuple[str, ...]]:
            rows = await super().query(text)
            if text.endswith("system.peers") and "schema_version" in text and self.behind:
                self.behind = False
                return [(*rows[0][:3], "another version"), *rows[1:]]
            return rows

    keyspace = Slow(None)
    run(lambda: migrate(keyspace, "k", SCHEMA))  # type: ignore[arg-type]
    assert [each for each in keyspace.done if each in "ABC"] == ["A", "B", "C"]


@pytest.mark.parametrize("what", ["agreement", "lock", "visible"])
def test_a_wait_that_reaches_its_limit_exactly_makes_one_more_attempt(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The wait may last exactly as long as the limit."""
    for name in ("AGREEMENT_S_MAX", "LOCK_WAIT_S_MAX", "VISIBLE_S_MAX"):
        monkeypatch.setattr(migrations, name, 1.0)
    monkeypatch.setattr(migrations, "LOCK_POLL_S", 0.25)
    attempts: list[float] = []

    def attempt() -> None:
        attempts.append(asyncio.get_running_loop().time())

    class Stuck(Opened):
        async def query(self, text: str) -> list[tuple[str, ...]]:
            if what == "agreement" and text.endswith("system.peers"):
                attempt()
            return await super().query(text)

        async def compare_and_set(self, statement: str, values: Sequence[Any]) -> dict[str, Any]:
            if statement == cql.LOCK:
                attempt()
                return {"[applied]": False, "holder": "another"}
            return await super().compare_and_set(statement, values)

    async def invisible() -> None:
        attempt()
        raise Corrupt("no such table")

    keyspace = Stuck(1, versions=[["v", "v", "u"]] if what == "agreement" else ())
    programs: dict[bool, Callable[[], Awaitable[Any]]] = {
        True: lambda: _retry_until_visible(invisible),
        False: lambda: migrate(keyspace, "k", SCHEMA),  # type: ignore[arg-type]
    }
    with pytest.raises((Corrupt, Unavailable)):
        run(programs[what == "visible"])
    assert attempts == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]


def test_a_node_whose_version_is_not_known_is_no_disagreement() -> None:
    keyspace = Keyspace(*BOTH_TABLES, versions=[["v", None, "v"]])  # type: ignore[list-item]
    run(lambda: migrate(keyspace, "k", SCHEMA))  # type: ignore[arg-type]
    assert [each for each in keyspace.done if each in "ABC"] == ["A", "B", "C"]


def test_a_lock_that_another_process_holds_is_waited_for_longer_than_its_lease() -> None:
    class Held(Opened):
        attempts = 0

        async def compare_and_set(self, statement: str, values: Sequence[Any]) -> dict[str, Any]:
            if statement == cql.LOCK:
                self.attempts += 1
                return {"[applied]": False, "holder": "another"}
            return await super().compare_and_set(statement, values)

    ended_s = 0.0
    keyspace = Held(1)

    async def program() -> None:
        nonlocal ended_s
        try:
            await migrate(keyspace, "k", SCHEMA)  # type: ignore[arg-type]
        finally:
            ended_s = asyncio.get_running_loop().time()

    with pytest.raises(Unavailable, match="held the schema's lock"):
        run(program)
    wait_s = migrations.LOCK_WAIT_S_MAX
    assert wait_s > migrations.LOCK_S
    assert wait_s < ended_s <= wait_s + 2 * migrations.LOCK_POLL_S
    assert keyspace.attempts == pytest.approx(wait_s / migrations.LOCK_POLL_S, abs=3)
    assert keyspace.done == []


def test_a_lock_that_cannot_be_released_is_no_error_of_the_migration() -> None:
    class Stuck(Opened):
        async def compare_and_set(self, statement: str, values: Sequence[Any]) -> dict[str, Any]:
            if statement == cql.UNLOCK:
                raise Unavailable("the node is down")
            return await super().compare_and_set(statement, values)

    keyspace = Stuck(2)
    run(lambda: migrate(keyspace, "k", SCHEMA))  # type: ignore[arg-type]
    assert len(keyspace.swaps) == 1


@pytest.mark.parametrize(("peers", "replicas"), [(0, 1), (1, 2), (2, 3), (5, 3)])
def test_a_new_keyspace_has_one_replica_for_each_node_up_to_three(peers: int, replicas: int) -> None:
    class Sized(Keyspace):
        async def query(self, text: str) -> list[tuple[str, ...]]:
            if text == "SELECT peer FROM system.peers":
                return [(f"10.0.0.{number}",) for number in range(peers)]
            return await super().query(text)

    keyspace = Sized(*BOTH_TABLES)
    run(lambda: use_keyspace(keyspace, SETTINGS))  # type: ignore[arg-type]
    assert f"'replication_factor': {replicas}}}" in keyspace.done[0]


def test_a_keyspace_that_is_there_is_not_created_and_one_that_vanishes_is_unavailable() -> None:
    class There(Keyspace):
        vanished = False

        async def query(self, text: str) -> list[tuple[Any, ...]]:
            if "system_schema.keyspaces" in text:
                return [] if self.vanished else [({"class": "SimpleStrategy", "replication_factor": "3"},)]
            return await super().query(text)

    keyspace = There(*BOTH_TABLES)
    run(lambda: use_keyspace(keyspace, SETTINGS))  # type: ignore[arg-type]
    assert keyspace.done == ["use books"]
    keyspace = There(*BOTH_TABLES)
    keyspace.vanished = True
    with pytest.raises(Unavailable, match="dropped by another process"):
        run(lambda: use_keyspace(keyspace, SETTINGS))  # type: ignore[arg-type]


def test_a_new_keyspace_is_read_when_the_nodes_agree_on_it() -> None:
    class Slow(Keyspace):
        looks = 0

        async def query(self, text: str) -> list[tuple[str, ...]]:
            rows = await super().query(text)
            if "system_schema.keyspaces" in text and self.done:
                assert self.looks > 0
            if "schema_version" in text and text.endswith("system.peers") and self.done:
                self.looks += 1
            return rows

    keyspace = Slow(*BOTH_TABLES)
    run(lambda: use_keyspace(keyspace, SETTINGS))  # type: ignore[arg-type]
    assert keyspace.done[-1] == "use books"


def test_a_keyspace_that_is_not_usable_yet_is_chosen_again() -> None:
    class Slow(Keyspace):
        attempts = 0

        async def use(self, keyspace: str) -> None:
            self.attempts += 1
            if self.attempts < 3:
                raise Corrupt("no such keyspace")
            await super().use(keyspace)

    keyspace = Slow(*BOTH_TABLES)
    run(lambda: use_keyspace(keyspace, SETTINGS))  # type: ignore[arg-type]
    assert keyspace.done[-1] == "use books"


def test_whether_a_schema_is_created_is_asked_again_while_its_table_is_not_usable() -> None:
    class Slow(Opened):
        attempts = 0

        async def query(self, text: str) -> list[tuple[str, ...]]:
            if text.startswith("SELECT value"):
                self.attempts += 1
                if self.attempts < 3:
                    raise Corrupt("no such table")
            return await super().query(text)

    assert run(lambda: is_created(Slow(1), "k")) is True  # type: ignore[arg-type]


# ---- opening the store


class Session:
    def __init__(self) -> None:
        self.closed = 0

    async def write(self, batch: Any) -> None:
        raise AssertionError("nothing is written")

    async def close(self) -> None:
        self.closed += 1


def test_a_store_that_cannot_be_opened_closes_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()

    async def connect(*_: Any) -> Session:
        return session

    async def refuse(*_: Any) -> None:
        raise InvalidInput("the keyspace is missing")

    monkeypatch.setattr(stores, "connect", connect)
    monkeypatch.setattr(stores, "use_keyspace", refuse)
    with pytest.raises(InvalidInput):
        run(lambda: stores.open_cassandra_store(SETTINGS, metrics=Metrics()))
    assert session.closed == 1


@pytest.mark.parametrize("created", [True, False])
def test_a_store_that_was_never_created_is_not_found_and_one_that_was_is_migrated(
    monkeypatch: pytest.MonkeyPatch, created: bool
) -> None:
    done: list[str] = []

    async def found(_: Any, keyspace: str) -> bool:
        assert keyspace == "books"
        return created

    async def use(*_: Any) -> None:
        done.append("use")

    async def migrated(_: Any, keyspace: str) -> None:
        done.append(f"migrate {keyspace}")

    monkeypatch.setattr(stores, "is_created", found)
    monkeypatch.setattr(stores, "use_keyspace", use)
    monkeypatch.setattr(stores, "migrate", migrated)
    opened = run(lambda: stores.find_store(Session(), SETTINGS, Metrics()))  # type: ignore[arg-type]
    assert (opened is not None) is created
    assert done == (["use", "migrate books"] if created else [])


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_node_is_asked_who_it_is_only_until_all_nodes_are_known(nodes: int) -> None:
    """Each query may reach another node; here the same one answers all, so that the first answer completes the list."""

    class One(Keyspace):
        asked = 0

        async def query(self, text: str) -> list[tuple[Any, ...]]:
            rows = [(f"host-{number}", f"10.0.0.{number}", "dc1", "v") for number in range(nodes)]
            if text.endswith("system.local"):
                self.asked += 1
                return rows[:1]
            return rows[1:]

    keyspace = One()
    found = run(lambda: migrations._nodes(keyspace))  # type: ignore[arg-type]
    assert [node.host_id for node in found] == [f"host-{number}" for number in range(nodes)]
    assert keyspace.asked == 1


def test_a_node_that_never_answers_for_itself_is_asked_twice_for_each_node() -> None:
    class Others(Keyspace):
        asked = 0

        async def query(self, text: str) -> list[tuple[Any, ...]]:
            self.asked += text.endswith("system.local")
            rows = [(f"host-{number}", f"10.0.0.{number}", "dc1", "v") for number in (1, 2)]
            return rows[:1] if text.endswith("system.local") else rows

    keyspace = Others()
    assert len(run(lambda: migrations._nodes(keyspace))) == 2  # type: ignore[arg-type]
    assert keyspace.asked == 6
