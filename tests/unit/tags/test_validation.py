"""Arguments of streams by tag: only a tag that an event can have, and only names of topics, are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidebook
from tests.unit.replication.ticking import replicate_ticks
from tidebook.core.errors import InvalidInput
from tidebook.core.event import Event
from tidebook.testing.replicating import replicate


async def test_topics_are_a_list_and_a_single_text_is_rejected(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        for topic in ("orders", "payments"):
            await book.journal(topic).append("a", [Event(topic, tags={"paid"})])
            await replicate(book.log, book.store, topic)
        await replicate_ticks(book.log, book.store)
        assert [event.payload async for event in book.tags.read("paid", topics=["orders"])] == ["orders"]
        with pytest.raises(InvalidInput, match=r"topics=\['orders'\]"):
            book.tags.read("paid", topics="orders")
        with pytest.raises(InvalidInput):
            book.tags.subscribe("paid", "mail", topics="orders")
        with pytest.raises(InvalidInput):
            book.feed("paid", "mail", topics="orders")
        for asked in (book.tags.horizon("orders"), book.tags.status("orders"), book.tags.rebuild("paid", topics="o")):
            with pytest.raises(InvalidInput):
                await asked


@pytest.mark.parametrize("tag", ["", None, 7, "\ud800"])
async def test_a_tag_that_no_event_can_have_is_rejected(tmp_path: Path, tag: str) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput):
            book.tags.read(tag)
        with pytest.raises(InvalidInput):
            book.tags.subscribe(tag, "mail")
        with pytest.raises(InvalidInput):
            await book.tags.rebuild(tag)


@pytest.mark.parametrize("group", ["", None, 7, "\ud800"])
async def test_a_group_without_a_valid_name_is_rejected(tmp_path: Path, group: str) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput):
            book.tags.subscribe("paid", group)
