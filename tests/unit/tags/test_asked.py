"""What callers ask for: a tag that an event can carry, and topics by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidebook
from tidebook import Event, InvalidInput
from tidebook.pipeline.ticking import settle
from tidebook.testing.replicating import replicate


async def test_a_text_is_one_topic_and_not_its_letters(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        for topic in ("orders", "payments"):
            await book.journal(topic).append("a", [Event(topic, tags={"paid"})])
            await replicate(book.log, book.store, topic)
        await settle(book)
        assert [event.payload async for event in book.tags.read("paid", topics="orders")] == ["orders"]
        async with book.tags.subscribe("paid", "mail", topics="orders", follow=False) as events:
            assert [event.payload async for event in events] == ["orders"]
        assert (await book.tags.horizon("orders")).topic == "orders"
        assert (await book.tags.rebuild("paid", topics="orders")).written == 1


@pytest.mark.parametrize("tag", ["", None, 7, "\ud800"])
async def test_what_no_event_can_carry_is_no_tag(tmp_path: Path, tag: str) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput):
            book.tags.read(tag)
        with pytest.raises(InvalidInput):
            book.tags.subscribe(tag, "mail")
        with pytest.raises(InvalidInput):
            await book.tags.rebuild(tag)


@pytest.mark.parametrize("group", ["", None, 7, "\ud800"])
async def test_a_group_is_a_text(tmp_path: Path, group: str) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput):
            book.tags.subscribe("paid", group)
