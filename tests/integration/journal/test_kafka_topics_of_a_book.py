"""A book on Kafka describes and deletes its topics; only a write creates one."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tidebook.core.errors import NotFound
from tidebook.core.event import Event
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

pytestmark = pytest.mark.kafka


async def test_a_topic_on_kafka_is_described_deleted_and_created_again(tmp_path: Path, kafka_bootstrap: str) -> None:
    sections = {"log": Section(f"kafka://{kafka_bootstrap}"), "journal": Section(None, {"partitions": 2})}
    async with Book(Settings(tmp_path / "book", sections)) as book:
        topic = f"t-{uuid.uuid4().hex[:12]}"
        journal = book.journal(topic)
        assert await journal.pointer("a") is None
        for missing in (book.describe_topic(topic), book.delete_topic(topic)):
            with pytest.raises(NotFound):
                await missing
        assert await book.log.topic(topic) is None
        assert not (tmp_path / "book").exists()
        await journal.append("a", [Event(1)])
        found = await book.describe_topic(topic)
        assert (found.kind, found.partitions, found.epoch) == ("journal", 2, 1)
        assert found.lag == sum(found.ends) >= 1
        await book.delete_topic(topic)
        assert await book.topics() == []
        assert await book.log.topic(topic) is None
        assert await book.journal(topic).pointer("a") is None
        assert (await book.journal(topic).append("a", [Event(2)])).last == 1
        await book.delete_topic(topic)
