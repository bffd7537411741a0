"""A topic holds journals or messages, never both; `log_topic` reads the messages of an embedded log."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.integration.outbox.relaying import Cluster
from tidebook.core.action import Mark
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event
from tidebook.core.record import encode_record, is_record
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.port import Outgoing
from tidebook.outbox import Message
from tidebook.outbox.kafka.sender import KafkaSender
from tidebook.outbox.kafka.target import KafkaTarget
from tidebook.outbox.settings import OutboxSettings
from tidebook.runtime.metrics import Metrics
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings
from tidebook.wiring.sync import SyncBook


def only_error(book: SyncBook) -> str:
    (status,) = book.outbox.status()
    assert (status.waiting, status.relayed) == (1, 0)
    return str(status.reason)


def test_messages_to_a_journal_topic_wait_and_the_reason_names_the_remedy(book: SyncBook) -> None:
    book.journal("orders").append("o-1", [Event(1)])
    book.outbox.publish_alone([Message("orders", b"paid")])
    assert book.outbox.relay(once=True) == 0
    assert "publish to another topic" in only_error(book)
    assert sum(book.describe_topic("orders").ends) == 1, "a message is among the journal's records"


def test_a_journal_topic_whose_log_was_emptied_is_still_recognized(book: SyncBook) -> None:
    done = book.journal("orders").append("o-1", [Event(1)])
    book._portal.run(book.log.truncate("orders", done.partition, before=done.offset + 1))
    book.outbox.publish_alone([Message("orders", b"paid")])
    assert book.outbox.relay(once=True) == 0
    assert "holds journals" in only_error(book)


def test_a_journal_topic_that_the_store_does_not_know_is_still_recognized(book: SyncBook) -> None:
    """The store was lost or replaced: the records of the log still show that the topic holds journals."""
    mark = encode_record(Mark(1), limit_bytes=1000)
    book._portal.run(book.log.create_topic("orders", 1))
    book._portal.run(book.log.append(Outgoing("orders", 0, None, mark)))
    book.outbox.publish_alone([Message("orders", b"paid")])
    assert book.outbox.relay(once=True) == 0
    assert "holds journals" in only_error(book)


def test_journals_are_refused_in_a_topic_of_messages(book: SyncBook) -> None:
    book.outbox.publish_alone([Message("orders", b"paid")])
    assert book.outbox.relay(once=True) == 1
    with pytest.raises(InvalidInput, match="use another topic for the journals"):
        book.journal("orders").append("o-1", [Event(1)])
    assert book.topics() == []
    assert list(book.journal("orders").read("o-1")) == []


@pytest.mark.parametrize("create", [True, False])
def test_a_missing_topic_is_created_only_if_allowed(tmp_path: Path, create: bool) -> None:
    settings = Settings(tmp_path, {"outbox": Section(None, {"create_topics": create})})
    with SyncBook(Book(settings)) as book:
        book.outbox.publish_alone([Message("mail", b"hello")])
        assert book.outbox.relay(once=True) == int(create)
        if not create:
            assert "create_topics" in only_error(book)


# ---- the consumer


async def test_a_consumer_reads_relayed_messages_and_follows(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book") as book:
        mail = book.log_topic("mail")
        assert [message async for message in mail.read()] == []
        assert await mail.offsets() == {}
        following = mail.read(follow=True)
        first = asyncio.ensure_future(anext(following))
        await book.outbox.publish_alone([Message("mail", b"one", key=b"k", headers=(("kind", b"x"),))])
        assert await book.outbox.relay(once=True) == 1
        one = await first
        assert (one.topic, one.key, one.payload, dict(one.headers)["kind"]) == ("mail", b"k", b"one", b"x")
        assert one.offset == 0
        assert one.timestamp.tzinfo is not None
        second = asyncio.ensure_future(anext(following))
        await book.outbox.publish_alone([Message("mail", None, key=b"k")])
        assert await book.outbox.relay(once=True) == 1
        two = await second
        assert (two.partition, two.offset, two.payload) == (one.partition, 1, None)
        assert "tidebook-tombstone" not in dict(two.headers)
        await following.aclose()  # type: ignore[attr-defined]
        after = {one.partition: one.offset + 1}
        assert [message.offset async for message in mail.read(offsets=after)] == [1]
        assert (await mail.offsets())[one.partition] == 2


async def test_a_consumer_refuses_offsets_that_no_topic_has_and_topics_of_journals(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book") as book:
        await book.journal("orders").append("o-1", [Event(1)])
        with pytest.raises(InvalidInput, match=r"book\.journal"):
            await anext(book.log_topic("orders").read())
        for offsets, error in (({99: 0}, NotFound), ({0: -1}, InvalidInput)):
            with pytest.raises(error):
                await anext(book.log_topic("orders").read(offsets=offsets))


# ---- on Kafka


def kafka_target(cluster: Cluster, **options: Any) -> KafkaTarget:
    settings = KafkaSettings.read(f"kafka://{cluster.bootstrap}", {})
    return KafkaTarget(settings, OutboxSettings(**options), outbox=b"o" * 16)


@pytest.mark.kafka
def test_a_relay_creates_a_missing_topic_on_kafka_unless_disabled(cluster: Cluster) -> None:
    name = f"outbox-{uuid.uuid4().hex[:12]}"
    with pytest.raises(NotFound):
        kafka_target(cluster, create_topics=False).topic(name)
    made = kafka_target(cluster).topic(name)
    assert (made.partitions, made.fence, made.weak) == (8, "timestamp", None)
    assert kafka_target(cluster).topic(name).uuid == made.uuid


@pytest.mark.kafka
async def test_a_truncated_journal_topic_is_still_recognized(tmp_path: Path, cluster: Cluster) -> None:
    sections = {"log": Section(f"kafka://{cluster.bootstrap}"), "journal": Section(None, {"partitions": 1})}
    async with Book(Settings(tmp_path, sections)) as book:
        topic = f"journals-{uuid.uuid4().hex[:12]}"
        for n in range(300):
            await book.journal(topic).append("o-1", [Event(n)], confirm=False)
        end = await book.log.end(topic, 0)
        await book.log.truncate(topic, 0, before=end - 5)
        with pytest.raises(InvalidInput):
            await asyncio.to_thread(kafka_target(cluster).topic, topic)


@pytest.mark.kafka
async def test_on_kafka_journals_and_messages_refuse_each_others_topics(tmp_path: Path, cluster: Cluster) -> None:
    """The relay reads only the log, not the journals' store."""
    sections: Mapping[str, Section] = {"log": Section(f"kafka://{cluster.bootstrap}", {})}
    async with Book(Settings(tmp_path, dict(sections))) as book:
        journals = f"journals-{uuid.uuid4().hex[:12]}"
        await book.journal(journals).create()  # without an append
        with pytest.raises(InvalidInput, match="publish to another topic"):
            await asyncio.to_thread(kafka_target(cluster).topic, journals)
        sender = KafkaSender(KafkaSettings.read(f"kafka://{cluster.bootstrap}", {}), Metrics())
        with pytest.raises(InvalidInput, match="publish to another topic"):
            await asyncio.to_thread(partial(sender.send, [Message(journals, b"paid")], wait=True))
        await asyncio.to_thread(sender.close)
        state = await book.log.topic(journals)
        assert state is not None
        assert is_record((await book.log.read(journals, 0, start=0, stop=1)).records[0].value)
        messages = cluster.topic(2, message_timestamp_type="LogAppendTime")
        await asyncio.to_thread(send, cluster, messages)
        with pytest.raises(InvalidInput, match="use another topic for the journals"):
            await book.journal(messages).append("o-1", [Event(1)])
        unknown = f"journals-{uuid.uuid4().hex[:12]}"
        assert [event async for event in book.journal(unknown).read("o-1")] == []
        assert await book.log.topic(unknown) is None, "reading has created a topic on Kafka"
        with pytest.raises(InvalidInput, match="Kafka consumer"):
            book.log_topic(messages)


def send(cluster: Cluster, topic: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    producer.produce(topic, b"paid")
    assert producer.flush(30) == 0
