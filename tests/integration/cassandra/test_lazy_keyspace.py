"""A book on Cassandra that is only read creates neither keyspace nor tables; the first write does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("acsylla")

import tidebook
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings
from tidebook.store.cassandra.session import CassandraSession, connect
from tidebook.testing.replicating import replicate

pytestmark = [pytest.mark.cassandra, pytest.mark.timeout(300)]


@pytest.fixture
async def session(cassandra_address: str) -> AsyncIterator[CassandraSession]:
    """A separate connection, and the name of a keyspace that is missing at first and dropped afterwards."""
    settings = CassandraSettings.read(f"cassandra://{cassandra_address}/k{uuid4().hex[:12]}")
    session = await connect(settings, Metrics())
    yield session
    await session.define(f"DROP KEYSPACE IF EXISTS {settings.keyspace}")
    await session.close()


@pytest.fixture
def settings_file(tmp_path: Path, cassandra_address: str, session: CassandraSession) -> Path:
    file = tmp_path / "tidebook.toml"
    url = f"cassandra://{cassandra_address}/{session._settings.keyspace}"
    file.write_text(f'folder = "data"\n[store]\nurl = "{url}"\n[journal]\nsegments = 8\npartitions = 1\n')
    return file


async def exists(session: CassandraSession) -> bool:
    listed = "SELECT keyspace_name FROM system_schema.keyspaces"
    return (session._settings.keyspace,) in await session.query(listed)


async def listed(items: Any) -> list[Any]:
    return [item async for item in items]


async def read_everything(book: tidebook.Book) -> list[Any]:
    """Read all that a book may be asked for; nothing is there."""
    journal, store = book.journal("orders"), book.store
    await journal.purge("o-1")
    return [
        await listed(journal.read("o-1")), await journal.pointer("o-1"), await listed(journal.ids()),
        await journal.exists(), await journal.load_snapshot("o-1"),
        await listed(book.tags.read("paid")), await listed(book.tags.list()), await book.topics(),
        await store.pointer("orders", 0), await store.head(Key("orders", "o-1")), await store.setting("x"),
        await store.heads("orders", ["o-1"]), await store.pointers("orders"), await listed(store.ids("orders")),
        await listed(store.parked()), await listed(store.expired("orders", now_ms=1)),
        await store.wait("orders", 0, beyond=None, timeout_s=0.01),
    ]  # fmt: skip


async def test_reading_creates_no_keyspace_and_the_first_write_does(
    settings_file: Path, session: CassandraSession
) -> None:
    async with tidebook.open(settings_file) as book, tidebook.open(settings_file) as other:
        assert not any(await read_everything(book))
        with pytest.raises(NotFound):
            await book.journal("orders").topic_config()
        assert await book.store.wait_any(timeout_s=0.01) == -1
        assert not await exists(session)
        await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        assert await exists(session)
        # One that was opened before the keyspace existed finds it, and reads and writes it.
        assert await other.journal("orders").pointer("o-1") == 1
        await replicate(other.log, other.store, "orders")
        assert [event.payload for event in await listed(book.journal("orders").read("o-1"))] == [1]
        assert await listed(other.store.ids("orders")) == ["o-1"]
        assert await other.store.wait("orders", 0, beyond=None, timeout_s=5)
    async with tidebook.open(settings_file) as book:
        assert await book.topics() == ["orders"]


@pytest.mark.parametrize("how", ["create()", "create=True"])
async def test_a_keyspace_is_created_when_that_is_asked_for(
    settings_file: Path, session: CassandraSession, how: str
) -> None:
    async with tidebook.open(settings_file, create=how == "create=True") as book:
        if how == "create()":
            await book.create()
        assert await exists(session)
        assert await book.topics() == []


async def test_a_write_that_may_create_no_keyspace_says_so(settings_file: Path, session: CassandraSession) -> None:
    settings_file.write_text(settings_file.read_text().replace("[journal]", "create_keyspace = false\n[journal]"))
    async with tidebook.open(settings_file) as book:
        assert await book.topics() == []
        with pytest.raises(InvalidInput, match="create_keyspace is off"):
            await book.journal("orders").append("o-1", [Event(1)])
    assert not await exists(session)
