"""Describe and delete the topics of a book."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidebook
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event
from tidebook.log.port import Outgoing
from tidebook.testing.replicating import replicate


async def test_a_journal_topic_is_described(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.journal("orders").append("a", [Event(1)])
        found = await book.describe_topic("orders")
        assert (found.kind, found.partitions, found.epoch) == ("journal", 4, 1)
        assert sum(found.ends) == found.lag == 1
        assert found.pointers == (None,) * 4


async def test_topics_of_messages_and_of_write_ahead_logs_are_distinguished(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.log.create_topic("mail", 2)
        await book.log.append(Outgoing("mail", 1, b"k", b"hello"))
        found = await book.describe_topic("mail")
        assert (found.kind, found.ends, found.epoch, found.lag) == ("messages", (0, 1), None, None)
        await book.wal("metrics").open_region(7, create=True)
        assert (await book.describe_topic("wal.metrics.7.data")).kind == "wal"
        with pytest.raises(InvalidInput, match="tidebook wal delete metrics 7"):
            await book.delete_topic("wal.metrics.7.data")


async def test_a_deleted_topic_leaves_nothing_and_its_name_can_be_used_again(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.journal("orders").append("a", [Event(1, tags={"paid"})])
        await book.journal("other").append("a", [Event(1)])
        await replicate(book.log, book.store, "orders")
        assert [tag async for tag in book.tags.list()] == ["paid"]
        await book.delete_topic("orders")
        assert [tag async for tag in book.tags.list()] == []
        assert await book.topics() == await book.log.topics() == ["other"]
        assert await book.journal("orders").pointer("a") is None
        with pytest.raises(NotFound):
            await book.delete_topic("orders")
        assert (await book.journal("orders").append("b", [Event(2)])).last == 1
        assert [id async for id in book.journal("orders").ids()] == ["b"]


async def test_an_interrupted_deletion_can_be_repeated(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.journal("orders").append("a", [Event(1)])
        await book.log.delete_topic("orders")  # as if the process had crashed here
    async with tidebook.open(tmp_path) as book:
        await book.delete_topic("orders")
        assert await book.topics() == []
        assert await book.journal("orders").pointer("a") is None
