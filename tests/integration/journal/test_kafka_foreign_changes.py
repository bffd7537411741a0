"""Changes of a Kafka topic by other programs: foreign records, added partitions, a re-created topic."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from tests.integration.journal.conftest import OpenBook
from tidebook.core.errors import Conflict, Corrupt
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.journal.journal import Journal

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra]

ANSWER_S_MAX = 30.0
GARBAGE = [(b"a", b"garbage"), (b"a", b""), (b"a", None), (b"\xff\xfe", b"\x00" * 100), (None, b"\x7b\x01....")]


def topic_name() -> str:
    return f"strangers-{uuid.uuid4().hex[:8]}"


def put_garbage(servers: str, topic: str) -> None:
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": servers})
    for key, value in GARBAGE:
        producer.produce(
            topic, value, key, partition=0, on_delivery=lambda error, _: failures.append(error) if error else None
        )
    assert producer.flush(ANSWER_S_MAX) == 0
    assert not failures


async def test_garbage_in_the_tail_stalls_neither_the_head_cache_nor_reads(
    open_book: OpenBook, kafka_bootstrap: str
) -> None:
    topic = topic_name()
    async with open_book(partitions=1) as book, open_book() as other:
        mine, others = book.journal(topic), other.journal(topic)
        first = await mine.append("a", [Event(1)])
        assert (await others.append("a", [Event(2)])).last == 2
        put_garbage(kafka_bootstrap, topic)
        assert [event.payload async for event in mine.read("a")] == [1, 2]
        put_garbage(kafka_bootstrap, topic)
        assert (await others.append("a", [Event(3)], expected=2)).last == 3
        with pytest.raises(Conflict) as caught:  # to detect this, the head cache must read past the foreign records
            await mine.append("a", [Event("late")], expected=2)
        assert caught.value.found == 3
        put_garbage(kafka_bootstrap, topic)
        assert (await mine.append("a", [Event(4)], expected=3)).last == 4
        assert [event.payload async for event in others.read("a")] == [1, 2, 3, 4]
        assert await book.log.end(topic, 0) >= first.offset + 4 + 3 * len(GARBAGE)
    async with open_book() as book:  # this book finds all of it in the tail
        assert [event.payload async for event in book.journal(topic).read("a")] == [1, 2, 3, 4]
        assert [id async for id in book.journal(topic).ids()] == ["a"]


async def test_a_topic_with_added_partitions_continues_with_its_original_ones(
    open_book: OpenBook, kafka_bootstrap: str
) -> None:
    topic, ids = topic_name(), [f"j-{n}" for n in range(8)]
    assert any(partition_of(id, 5) != partition_of(id, 2) for id in ids)
    async with open_book(partitions=2) as book:
        for id in ids:
            await book.journal(topic).append(id, [Event(1)])
        admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
        admin.create_partitions([NewPartitions(topic, 5)])[topic].result(ANSWER_S_MAX)
        while len(admin.list_topics(topic, timeout=ANSWER_S_MAX).topics[topic].partitions) < 5:
            pass  # the controller has them; the broker that receives the request learns of them a moment later
        async with open_book() as fresh:  # opened only now, so that it sees the changed topic
            for id in ids:
                done = await fresh.journal(topic).append(id, [Event(2)], expected=1)
                assert (done.last, done.partition) == (2, partition_of(id, 2))
                with pytest.raises(Conflict):  # the head cache of the other book has followed
                    await book.journal(topic).append(id, [Event("late")], expected=1)
                assert (await book.journal(topic).append(id, [Event(3)], expected=2)).partition == done.partition
                for each in (book, fresh):
                    assert [event.payload async for event in each.journal(topic).read(id)] == [1, 2, 3]
            assert (await fresh.journal(topic).create()).partitions == 2
            state = await fresh.log.topic(topic)
            assert state is not None
            assert state.partitions == 5


async def read(journal: Journal) -> None:
    [_ async for _ in journal.read("a")]


@pytest.mark.parametrize(
    "act",
    [
        lambda journal: journal.append("a", [Event("void")], expected=3),
        lambda journal: journal.append("a", [Event("void")], confirm=False),
        read,
    ],
    ids=["append", "unconfirmed", "read"],
)
async def test_a_topic_recreated_under_a_running_process_is_reported_and_nothing_is_confirmed(
    open_book: OpenBook, act: Callable[[Journal], Awaitable[object]]
) -> None:
    topic = topic_name()
    async with open_book(partitions=1) as book, open_book() as other:
        journal = book.journal(topic)
        for number in range(3):
            await journal.append("a", [Event(number)], expected=number)
        await other.log.delete_topic(topic)
        await other.log.create_topic(topic, 1)
        with pytest.raises(Corrupt, match=r"created again|another incarnation"):
            await act(journal)
        with pytest.raises(Corrupt):
            await journal.append("a", [Event("void")])
        await journal.adopt()
        assert (await journal.append("a", [Event("counts")], expected=0)).last == 1
