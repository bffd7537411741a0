"""The keyspace and its tables: created once, migrated under a lock, and an incomplete migration is always reported."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from tidebook.core.errors import Corrupt, InvalidInput, TidebookError, Unavailable, UnknownVersion
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings, migrations, open_cassandra_store
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.migrations import MIGRATIONS, SCHEMA, VERSION, Migration, migrate, use_keyspace
from tidebook.store.cassandra.session import CassandraSession, connect

pytestmark = [pytest.mark.cassandra, pytest.mark.timeout(300)]

EXTRA = "CREATE TABLE IF NOT EXISTS extra (id text PRIMARY KEY)"
BROKEN = Migration("broken", (EXTRA, "ALTER TABLE nowhere ADD x text"))
REPAIRED = Migration("repaired", (EXTRA,))
BEFORE, AFTER = str(len(MIGRATIONS)), str(len(MIGRATIONS) + 1)


@pytest.fixture
async def fresh(cassandra_address: str) -> AsyncIterator[CassandraSettings]:
    """Return settings for a keyspace that does not exist yet, and drop it after the test."""
    settings = CassandraSettings.read(f"cassandra://{cassandra_address}/k{uuid4().hex[:12]}")
    yield settings
    session = await connect(settings, Metrics())
    await session.define(f"DROP KEYSPACE IF EXISTS {settings.keyspace}")
    await session.close()


@pytest.fixture
async def session(fresh: CassandraSettings) -> AsyncIterator[CassandraSession]:
    session = await connect(fresh, Metrics())
    await use_keyspace(session, fresh)
    yield session
    await session.close()


async def version(session: CassandraSession) -> str | None:
    row = (await session.read_serial(cql.SETTING, [SCHEMA, VERSION])).first()
    return None if row is None else row.as_tuple()[0]


async def test_processes_that_open_a_new_keyspace_at_once_all_find_it_complete(fresh: CassandraSettings) -> None:
    stores = await asyncio.gather(*(open_cassandra_store(fresh, metrics=Metrics()) for _ in range(4)))
    for store in stores:
        assert await store.topics() == []
        assert await store.pointer("orders", 0) is None
        await store.close()


OPENER = """
import asyncio, sys
from tidebook.runtime.metrics import Metrics
from tidebook.core.topic_config import TopicConfig
from tidebook.store.cassandra import CassandraSettings, open_cassandra_store

async def main():
    settings = CassandraSettings.read(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    stores = await asyncio.gather(*(open_cassandra_store(settings, metrics=Metrics()) for _ in range(2)))
    for store in stores:
        config = TopicConfig(topic_id=sys.argv[2], partitions=1)
        print((await store.set_topic_config("orders", config, expected=None)).topic_id, flush=True)
        await store.close()

asyncio.run(main())
"""


async def test_several_processes_create_a_new_keyspace_at_once_and_share_it(
    fresh: CassandraSettings, session: CassandraSession
) -> None:
    """Each process opens two stores. All of them see what one has written, so each table exists once."""
    await session.define(f"DROP KEYSPACE IF EXISTS {fresh.keyspace}")
    url = f"cassandra://{fresh.hosts[0]}:{fresh.port}/{fresh.keyspace}"
    openers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", OPENER, url, f"of process {number}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )
        for number in range(3)
    ]  # fmt: skip
    for opener in openers:
        assert opener.stdout is not None
        assert await opener.stdout.readline() == b"ready\n"
    reported = await asyncio.gather(*(opener.communicate(b"go\n") for opener in openers))
    assert [opener.returncode for opener in openers] == [0, 0, 0]
    lines = [line for out, _ in reported for line in out.decode().splitlines()]
    assert len(lines) == 6
    assert len(set(lines)) == 1
    tables = await session.query(
        f"SELECT table_name FROM system_schema.tables WHERE keyspace_name = '{fresh.keyspace}'"
    )
    assert {name for (name,) in tables} >= {"locks", "setting", "metajournal", "journal", "pointer"}
    await session.use(fresh.keyspace)
    assert await version(session) == BEFORE


async def test_the_node_that_creates_the_first_table_is_reached_by_its_address(
    fresh: CassandraSettings, session: CassandraSession
) -> None:
    statement = "CREATE TABLE IF NOT EXISTS extra (id text PRIMARY KEY)"
    [(address,)] = await session.query("SELECT rpc_address FROM system.local")
    await session.define(statement, address=address)
    assert await session.query("SELECT id FROM extra") == []
    # If there is no such node, any other creates the table; this is harmless, because the statement is idempotent.
    await session.define(statement, address="127.9.9.9")


async def test_a_migration_that_fails_is_named_and_leaves_the_version(
    fresh: CassandraSettings, session: CassandraSession
) -> None:
    await migrate(session, fresh.keyspace)
    with pytest.raises(TidebookError) as reported:
        await migrate(session, fresh.keyspace, (*MIGRATIONS, BROKEN))
    assert isinstance(reported.value, Corrupt)
    assert f"migration {AFTER} (broken) failed" in reported.value.__notes__[0]
    assert await version(session) == BEFORE

    # The lock was released, so the corrected migration runs at once, over what the broken one left.
    await asyncio.wait_for(migrate(session, fresh.keyspace, (*MIGRATIONS, REPAIRED)), 20)
    assert await version(session) == AFTER
    await migrate(session, fresh.keyspace, (*MIGRATIONS, REPAIRED))


async def test_a_keyspace_of_a_newer_version_is_refused(fresh: CassandraSettings, session: CassandraSession) -> None:
    await migrate(session, fresh.keyspace, (*MIGRATIONS, REPAIRED))
    with pytest.raises(UnknownVersion) as reported:
        await open_cassandra_store(fresh, metrics=Metrics())
    assert (reported.value.version, reported.value.known) == (len(MIGRATIONS) + 1, len(MIGRATIONS))


async def test_the_lock_of_a_process_that_died_expires(
    fresh: CassandraSettings, session: CassandraSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(session, fresh.keyspace)
    assert (await session.compare_and_set(cql.LOCK, [SCHEMA, "the dead", 2]))["[applied]"]
    await asyncio.wait_for(migrate(session, fresh.keyspace, (*MIGRATIONS, REPAIRED)), 20)
    assert await version(session) == AFTER


async def test_a_process_that_waits_too_long_for_the_lock_gets_an_error(
    fresh: CassandraSettings, session: CassandraSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(session, fresh.keyspace)
    assert (await session.compare_and_set(cql.LOCK, [SCHEMA, "another", 60]))["[applied]"]
    monkeypatch.setattr(migrations, "LOCK_WAIT_S_MAX", 0.3)
    with pytest.raises(Unavailable):
        await migrate(session, fresh.keyspace, (*MIGRATIONS, REPAIRED))
    assert await version(session) == BEFORE


async def test_a_missing_keyspace_is_created_only_if_the_settings_allow_it(fresh: CassandraSettings) -> None:
    reported: dict[str, Any] = {"hosts": fresh.hosts, "port": fresh.port, "keyspace": fresh.keyspace}
    with pytest.raises(InvalidInput, match="create_keyspace"):
        await open_cassandra_store(CassandraSettings(**reported, create_keyspace=False), metrics=Metrics())


async def test_consistency_levels_that_let_a_read_miss_a_write_are_refused(fresh: CassandraSettings) -> None:
    reported: dict[str, Any] = {"hosts": fresh.hosts, "port": fresh.port, "keyspace": fresh.keyspace, "replication": 3}
    with pytest.raises(InvalidInput, match="can miss"):
        await open_cassandra_store(CassandraSettings(**reported, consistency="LOCAL_ONE"), metrics=Metrics())
    with pytest.raises(InvalidInput, match="can miss"):
        await open_cassandra_store(CassandraSettings(**reported, read_consistency="ONE"), metrics=Metrics())
