"""A book while its Kafka or Cassandra is down or truncated: what works, what is reported, and that it recovers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.journal.conftest import OpenBook
from tidebook.core.errors import LogLost, NotFound, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.event import Event
from tidebook.journal.journal import Journal
from tidebook.replication.status import accept_losses, find_starts, topic_configs
from tidebook.testing.replicating import replicate
from tidebook.testing.servers import Cassandra, Kafka
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra, pytest.mark.timeout(300)]

SHORT = {"send_timeout_ms": 2_000, "request_timeout_ms": 2_000}
#: An error is reported within this time; a busy machine gets some more.
SOON_S = 20.0
BACK_S = 120.0


def topic_name() -> str:
    return f"down-{uuid.uuid4().hex[:8]}"


async def payloads(journal: Journal, id: str) -> list[Any]:
    return [event.payload async for event in journal.read(id)]


async def until_it_works(act: Callable[[], Awaitable[Any]]) -> Any:
    """Retry as a caller would; a broker that has just started may not know its topics."""
    give_up = time.monotonic() + BACK_S
    while True:
        try:
            return await act()
        except (Unavailable, OutcomeUnknown, NotFound):
            assert time.monotonic() < give_up
            await asyncio.sleep(0.1)


async def reported_soon(act: Awaitable[Any], *kinds: type[TidebookError]) -> TidebookError:
    with pytest.raises(kinds) as caught:
        await asyncio.wait_for(act, SOON_S)
    return caught.value


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[Kafka]:
    with Kafka(tmp_path / "kafka") as kafka:
        yield kafka


async def test_an_outage_of_kafka_is_reported_and_the_head_cache_survives_the_restart(
    own_kafka: Kafka, open_book: OpenBook
) -> None:
    servers, topic = own_kafka.url.removeprefix("kafka://"), topic_name()
    async with (
        open_book(servers=servers, log=SHORT, partitions=1) as book,
        open_book(servers=servers, log=SHORT) as other,
    ):
        mine, others = book.journal(topic), other.journal(topic)
        # A loaded machine may exceed these short timeouts, so each step is retried.
        await until_it_works(lambda: mine.append("a", [Event(1)], append_id=b"1" * 16))
        await until_it_works(lambda: others.append("a", [Event(2)], append_id=b"2" * 16))
        assert await until_it_works(lambda: payloads(mine, "a")) == [1, 2]

        await asyncio.to_thread(own_kafka.kill9)
        await reported_soon(mine.append("a", [Event(3)], append_id=b"3" * 16), Unavailable, OutcomeUnknown)
        for act in (payloads(mine, "a"), mine.pointer("a")):
            error = await reported_soon(act, Unavailable, OutcomeUnknown)
            assert "sending to" in str(error) or "Kafka" in str(error)
        await asyncio.to_thread(own_kafka.start)

        appended = await until_it_works(lambda: mine.append("a", [Event(3)], append_id=b"3" * 16))
        assert (appended.first, appended.last) == (3, 3)
        await until_it_works(lambda: others.append("a", [Event(4)], append_id=b"4" * 16))
        assert await until_it_works(lambda: payloads(mine, "a")) == [1, 2, 3, 4]
        assert (await until_it_works(lambda: mine.append("a", [Event(5)], append_id=b"5" * 16))).last == 5


async def test_after_retention_overtakes_replication_errors_name_the_lost_range_until_the_loss_is_accepted(
    open_book: OpenBook,
) -> None:
    topic = topic_name()
    async with open_book(partitions=1) as book:
        for number in range(6):
            await book.journal(topic).append("a", [Event(number)])
            if number == 1:
                await replicate(book.log, book.store, topic)
        pointer = await book.store.pointer(topic, 0)
        assert pointer is not None
        first = pointer.position.offset + 1
        await book.log.truncate(topic, 0, before=first + 2)
    async with open_book() as book:
        journal = book.journal(topic)
        for act in (
            payloads(journal, "a"),
            find_starts(book.log, book.store, await topic_configs(book.store, [topic])),
        ):
            error = await reported_soon(act, LogLost)
            assert isinstance(error, LogLost)
            assert (error.topic, error.partition, error.first, error.last) == (topic, 0, first, first + 1)
        [loss] = await accept_losses(book.log, book.store, [topic])
        assert (loss.first, loss.last) == (first, first + 1)
    async with open_book() as book:
        assert await payloads(book.journal(topic), "a") == [0, 1, 4, 5]
        assert (await book.journal(topic).append("a", [Event("more")])).last == 5


@pytest.fixture
def own_cassandra(tmp_path: Path) -> Iterator[Cassandra]:
    with Cassandra(tmp_path / "cassandra").temporarily() as server:
        yield server


async def test_cassandra_down_stops_only_operations_that_need_it(
    own_cassandra: Cassandra, kafka_bootstrap: str, tmp_path: Path
) -> None:
    """The server is frozen first, and then killed."""
    sections = {
        "log": Section(f"kafka://{kafka_bootstrap}"),
        "store": Section(own_cassandra.url),
        "journal": Section(None, {"partitions": 1}),
    }
    topic = topic_name()
    async with Book(Settings(tmp_path, sections)) as book:
        await book.journal(topic).append("stored", [Event(1)])
        await replicate(book.log, book.store, topic)
    async with Book(Settings(tmp_path, sections)) as book:  # the tail of this book begins after the stored events
        journal = book.journal(topic)
        await journal.append("tail", [Event(1)])
        downs: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (own_cassandra.pause, own_cassandra.resume),
            (own_cassandra.kill9, own_cassandra.start),
        ]
        for number, (down, up) in enumerate(downs):
            await asyncio.to_thread(down)
            try:
                assert (await journal.append("new", [Event(number)], confirm=False)).offset > 0
                assert (await journal.append("tail", [Event("more")])).last == number + 2
                assert await payloads(journal, "tail") == [1, *["more"] * (number + 1)]
                await reported_soon(payloads(journal, "stored"), Unavailable)
                await reported_soon(journal.append(f"unknown {number}", [Event(1)]), Unavailable)
            finally:
                await asyncio.to_thread(up)
            assert await until_it_works(lambda: payloads(journal, "stored")) == [1]
            assert await until_it_works(lambda: payloads(journal, "new")) == list(range(number + 1))
