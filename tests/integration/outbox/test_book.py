"""The outbox of an embedded book, through its sync and async facades."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import tidebook
from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import Cluster, until
from tidebook import outbox
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event
from tidebook.log.sqlite.relay_lock import RelayLocks
from tidebook.outbox import Message
from tidebook.outbox.outbox import Outbox
from tidebook.outbox.relay import Relay
from tidebook.wiring.sync import SyncBook


def records(book: SyncBook, topic: str) -> list[Any]:
    async def read() -> list[Any]:
        log = book.log
        state = await log.topic(topic)
        assert state is not None
        found: list[Any] = []
        for partition in range(state.partitions):
            end = await log.end(topic, partition)
            found += (await log.read(topic, partition, start=0, stop=end, limit=100_000)).records if end else ()
        return found

    return book._portal.run(read())


def test_an_embedded_book_relays_to_its_own_log(book: SyncBook, engine: Engine) -> None:
    with Session(engine) as s, s.begin():
        outbox.publish(s, topic="orders", key=b"1", payload=b"paid", headers={"kind": b"x"})
        outbox.publish(s, topic="orders", key=b"1", payload=None)
    with Session(engine) as s:
        outbox.publish(s, topic="orders", payload=b"gone")
        s.rollback()
    assert book.outbox.relay(once=True) == 2
    first, second = records(book, "orders")
    assert (first.key, first.value, dict(first.headers)["kind"]) == (b"1", b"paid", b"x")
    assert "tidebook-tombstone" in dict(second.headers)
    assert [(each.topic, each.waiting, each.relayed) for each in book.outbox.status()] == [("orders", 0, 2)]


def test_many_messages_keep_their_order_by_key(book: SyncBook) -> None:
    messages = [Message("orders", str(n).encode(), key=str(n % 7).encode()) for n in range(3000)]
    book.outbox.publish_alone(messages)
    assert book.outbox.relay(once=True) == 3000
    found = records(book, "orders")
    for key in {each.key for each in found}:
        numbers = [int(each.value) for each in found if each.key == key]
        assert numbers == sorted(numbers)


def test_messages_sent_by_a_dead_embedded_relay_are_found(book: SyncBook) -> None:
    """The batch is in the log and the session is open: the next relay deletes the rows and sends nothing twice."""
    from tidebook.outbox import batch_selection as plan
    from tidebook.outbox.port import BatchLimit, NewSession

    box: Outbox = book.outbox
    box.publish_alone([Message("orders", str(n).encode(), key=b"k") for n in range(10)])
    store = box._parts.database.connect()
    identity = store.identity()
    target = box._parts.targets(identity).of("orders")
    topic = target.topic("orders")
    hold = store.try_lock("orders", lock_id=uuid.uuid4().bytes, owner="dead")
    assert hold is not None
    batch = store.begin(
        hold,
        NewSession(uuid.uuid4().bytes, topic.fence, topic.uuid, target.ends(topic)),
        lambda rows, held: plan.select_batch(rows, held, topic, box.settings),
        BatchLimit(),
    )
    channel = target.channel(topic, fresh=True)
    channel.start(plan.to_relayed(batch.messages[:6], session=batch.session, outbox=identity), timestamp_ms=0)
    # While the lock of the dead relay is held (its process is only stopped), no other relay sends.
    store.unlock(hold)
    assert RelayLocks(book.settings.folder).take("orders") is False
    assert box.relay(once=True) == 0
    target.release("orders")
    store._execute("UPDATE kafka_topic_info SET error = 0, retry_at = NULL")
    assert box.relay(once=True) == 4
    store.close()
    assert [each.value for each in records(book, "orders")] == [str(n).encode() for n in range(10)]


async def test_an_async_book_relays_in_the_background(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book") as book:
        engine = create_async_engine(book.outbox.url.replace("sqlite:", "sqlite+aiosqlite:"))
        async with book.outbox.relaying() as relay:
            async with engine.begin() as connection:
                await book.outbox.publish(connection, topic="mail", payload=b"x")
                await book.outbox.append(connection, "orders", "o-1", [Event(1)])
            await asyncio.to_thread(until, lambda: relay.metrics.counted("outbox_sent") == 2, "both are sent")
        await engine.dispose()
        assert [e.payload async for e in book.journal("orders").read("o-1")] == [1]
        task = asyncio.create_task(book.outbox.relay())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert {each.topic: each.relayed for each in await book.outbox.status()} == {"mail": 1, "journal:orders": 1}


def test_an_error_that_ends_a_background_relay_is_raised(book: SyncBook, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    def relayed() -> None:
        with book.outbox.relaying() as relay:
            book.outbox.publish_alone([Message("orders", b"x")])
            until(lambda: relay._shutdown.requested(), "the relay ends")

    monkeypatch.setattr(Relay, "_relay", broken)
    with pytest.raises(RuntimeError, match="broken"):
        relayed()


def test_a_with_block_also_governs_the_books_own_publish(book: SyncBook) -> None:
    with outbox.use("test") as sent:
        book.outbox.publish(None, topic="orders", payload=b"x")
        book.outbox.publish_list(None, [Message("orders", b"y")])
        book.outbox.append(None, "orders", "o-1", [Event(1)])
    assert [each.topic for each in sent.messages] == ["orders", "orders", "journal:orders"]
    with book.outbox.use("test") as own:
        outbox.publish(None, topic="orders", payload=b"z")
    assert len(own.messages) == 1
    assert book.outbox.status() == []


def test_a_backend_that_bypasses_the_database_needs_kafka(book: SyncBook) -> None:
    with pytest.raises(InvalidInput, match="Kafka log"), book.outbox.use("kafka"):
        pass


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.parametrize("name", ["kafka", "kafka_async"])
def test_the_kafka_backends_send_without_the_outbox(
    postgres: Database, cluster: Cluster, tmp_path: Path, name: str
) -> None:
    topic = cluster.topic(partitions=1)
    path = tmp_path / "tidebook.toml"
    path.write_text(
        f'[log]\nurl = "kafka://{cluster.bootstrap}"\n[sql]\nurl = "{postgres.url}"\n[outbox]\nbackend = "{name}"\n'
    )
    with tidebook.open_sync(path) as book:
        box: Any = book.outbox
        box.publish(None, topic=topic, key=b"k", payload=b"1", headers={"a": b"b"})
        with box.use(name):
            outbox.publish_list(None, [Message(topic, b"2", key=b"k", partition_key=b"p")])
        if name == "kafka":
            assert [each.value for each in cluster.read(topic)] == [b"1", b"2"]
            with pytest.raises(NotFound):
                box.publish(None, topic=f"missing-{uuid.uuid4().hex[:8]}", payload=b"x")
            with pytest.raises(InvalidInput, match="not in the log"):
                box.publish(None, topic=topic, payload=bytes(2_000_000))
    assert [each.value for each in cluster.read(topic)] == [b"1", b"2"]
    assert postgres.waiting() == 0
