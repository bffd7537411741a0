"""Reads create no folder, no file and no topic; only a write or an explicit `create` does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tidebook
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event
from tidebook.log.port import Log
from tidebook.store.port import StoreWriter
from tidebook.wiring.lazy_adapters import LazyLog, LazyStore


@pytest.fixture
def missing(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "book"


async def test_reading_a_missing_book_returns_nothing_and_creates_nothing(missing: Path) -> None:
    async with tidebook.open(missing) as book:
        orders = book.journal("orders")
        assert [event async for event in orders.read("a")] == []
        assert await orders.pointer("a") is None
        assert [id async for id in orders.ids()] == []
        assert await orders.load_snapshot("a") is None
        assert not await orders.exists()
        assert [event async for event in book.tags.read("paid")] == []
        assert [tag async for tag in book.tags.list()] == []
        assert (await book.tags.horizon()).topic is None
        assert await book.topics() == []
        await orders.purge("a")  # a purge of a missing journal does nothing
        for missing_part in (orders.topic_config(), orders.delete_snapshots("a"), book.describe_topic("orders")):
            with pytest.raises(NotFound):
                await missing_part
        with pytest.raises(NotFound):
            await book.delete_topic("orders")
    assert not missing.parent.exists()


async def test_following_a_missing_book_creates_nothing(missing: Path) -> None:
    async with tidebook.open(missing) as book:
        stream = book.tags.read("paid", follow=True)
        following = asyncio.ensure_future(anext(stream))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not following.done()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert not missing.parent.exists()


async def test_reading_an_unknown_topic_does_not_create_it(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.journal("orders").append("a", [Event(1)])
        other = book.journal("oders")
        assert [event async for event in other.read("a")] == []
        assert await other.pointer("a") is None
        assert await book.log.topics() == await book.topics() == ["orders"]


async def test_the_first_write_creates_the_book(missing: Path) -> None:
    async with tidebook.open(missing) as book:
        orders = book.journal("orders")
        assert await orders.pointer("a") is None
        await orders.append("a", [Event(1)])
        assert await orders.pointer("a") == 1
        assert [event.payload async for event in orders.read("a")] == [1]
        assert {"log.db", "store.db"} <= {file.name for file in missing.iterdir()}


async def test_a_reader_sees_files_that_another_book_creates_meanwhile(missing: Path) -> None:
    async with tidebook.open(missing) as reader, tidebook.open(missing) as writer:
        orders = reader.journal("orders")
        tail = orders.tail("a")
        first = asyncio.ensure_future(anext(tail))
        assert await orders.pointer("a") is None
        await writer.journal("orders").append("a", [Event("paid")])
        assert await orders.pointer("a") == 1
        assert (await first).payload == "paid"


@pytest.mark.parametrize("way", ["open", "call"])
async def test_a_book_is_created_on_request(missing: Path, way: str) -> None:
    async with tidebook.open(missing, create=way == "open") as book:
        if way == "call":
            await book.create()
        assert {"log.db", "store.db"} <= {file.name for file in missing.iterdir()}


async def test_a_write_ahead_file_without_its_database_is_damage_not_a_missing_book(tmp_path: Path) -> None:
    (tmp_path / "store.db-wal").touch()
    with pytest.raises(tidebook.Corrupt):
        async with tidebook.open(tmp_path):
            pass


async def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput):
        async with tidebook.open(tmp_path / "file"):
            pass


async def test_inspecting_an_unused_outbox_creates_nothing(missing: Path) -> None:
    async with tidebook.open(missing) as book:
        assert await book.outbox.status() == []
        assert await book.outbox.parked() == []
        assert await book.outbox.parked_retry("mail") == await book.outbox.parked_drop("mail") == 0
    assert not missing.parent.exists()


async def test_inspecting_queues_creates_neither_the_file_nor_a_queue(missing: Path) -> None:
    async with tidebook.open(missing) as book:
        assert [await book.queues.names(), await book.queues.status(), await book.queues.dead_letters()] == [[], [], []]
        mail = book.queue("mail")
        assert [await mail.entries(), await mail.dead_letters()] == [[], []]
        assert (await mail.status()).waiting == 0
        with pytest.raises(NotFound):
            await mail.drop(1)
    assert not missing.parent.exists()
    async with tidebook.open(missing) as book:
        await book.queue("mail").put({"to": "a"})
        assert (await book.queue("mail").status()).due == 1
        assert await book.queue("nail").entries() == []
        assert await book.queues.names() == ["mail"]


@pytest.mark.parametrize(("lazy", "port"), [(LazyLog, Log), (LazyStore, StoreWriter)])
def test_every_method_and_attribute_of_a_port_exists_before_the_file(
    lazy: type[LazyLog | LazyStore], port: type, missing: Path
) -> None:
    created = lazy(missing / "file", lambda: None)
    names = [name for base in port.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", ()))]
    wanted = {name for name in names if not name.startswith("_")}
    assert len(wanted) > 10
    assert {name for name in wanted if not hasattr(created, name)} == set()
    with pytest.raises(AttributeError):
        created.no_such_method()


async def test_a_method_that_was_bound_before_the_file_existed_reads_the_new_file(missing: Path) -> None:
    async with tidebook.open(missing) as reader, tidebook.open(missing) as writer:
        topics = reader.log.topics
        assert await topics() == []
        await writer.log.create_topic("t", 1)
        assert await topics() == ["t"]


def test_reading_a_missing_blocking_book_creates_nothing(missing: Path) -> None:
    with tidebook.open_sync(missing) as book:
        assert list(book.journal("orders").read("a")) == []
        assert book.journal("orders").pointer("a") is None
        assert book.topics() == []
    assert not missing.parent.exists()
    with tidebook.open_sync(missing, create=True):
        assert missing.exists()
