"""Each event of a tag becomes one entry, exactly once, however often it is delivered and by whichever process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import tidebook
from tidebook.cli.app import main
from tidebook.core.event import Event
from tidebook.queue import Entry
from tidebook.replication.ticks import tick
from tidebook.tags.event import TaggedEvent
from tidebook.testing.replicating import replicate
from tidebook.wiring import feed as feed_module

pytestmark = pytest.mark.postgres

#: Feeds the queue, and is killed after this many batches, at the moment when the last was put and it had no answer yet.
FEEDER = """
import asyncio, os, signal, sys
import tidebook
from tidebook.queue.queue import Queue

async def main(where, batches):
    put_once = Queue.put_once

    async def dies(self, *arguments, **named):
        global left
        left -= 1
        put = await put_once(self, *arguments, **named)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return put

    Queue.put_once = dies
    async with tidebook.open(where) as book:
        await book.feed("paid", "mail").run(follow=False)

import tidebook.wiring.feed as feed
feed.BATCH_MAX = 7
left = int(sys.argv[2])
asyncio.run(main(sys.argv[1], left))
"""


async def replicated(book: tidebook.Book) -> None:
    """Replicate all events to their tag streams."""
    await replicate(book.log, book.store, "orders")
    await tick(book.log, book.store, ["orders"])
    await replicate(book.log, book.store, "orders")


@pytest_asyncio.fixture
async def paid(book: tidebook.Book) -> AsyncIterator[tidebook.Book]:
    """A book with 60 events of a tag, in 5 journals."""
    orders = book.journal("orders")
    for number in range(60):
        await orders.append(f"o-{number % 5}", [Event({"total": number}, tags={"paid"})])
    await replicated(book)
    yield book


async def totals(book: tidebook.Book, queue: str = "mail") -> list[int]:
    """Return the entries that were put."""
    return sorted(job.data["payload"]["total"] for job in await book.queue(queue).claim(1_000))


async def test_each_event_of_a_tag_becomes_an_entry(paid: tidebook.Book) -> None:
    assert await paid.feed("paid", "mail").run(follow=False) == 60
    found = {job.data["payload"]["total"]: job.data for job in await paid.queue("mail").claim(100)}
    assert found[7] == {"topic": "orders", "id": "o-2", "seq_nr": 2, "tag": "paid", "payload": {"total": 7}}
    for journal in range(5):  # in the order of their journal
        assert [total for total in found if total % 5 == journal] == list(range(journal, 60, 5))


async def test_what_was_put_is_not_put_again(paid: tidebook.Book) -> None:
    await paid.feed("paid", "mail").run(follow=False)
    assert await paid.feed("paid", "mail").run(follow=False) == 0
    await paid.journal("orders").append("o-1", [Event({"total": 60}, tags={"paid"})])
    await replicated(paid)
    assert await paid.feed("paid", "mail").run(follow=False) == 1
    assert await totals(paid) == list(range(61))


async def test_feeds_of_two_queues_do_not_know_one_another(paid: tidebook.Book) -> None:
    await paid.feed("paid", "mail").run(follow=False)
    await paid.feed("paid", "invoices").run(follow=False)
    assert await totals(paid, "mail") == await totals(paid, "invoices") == list(range(60))


async def test_an_entry_is_made_as_the_caller_says_and_none_is_left_out(paid: tidebook.Book) -> None:
    def make(event: TaggedEvent) -> Entry | None:
        return None if event.payload["total"] % 2 else Entry(data=event.payload["total"], key=event.id, priority=20)

    await paid.feed("paid", "mail", make=make).run(follow=False)
    jobs = await paid.queue("mail").claim(100)
    assert sorted((job.key, job.data, job.priority) for job in jobs) == [
        (f"o-{number}", 50 + (number if number % 2 == 0 else 5 + number), 20) for number in range(5)
    ]
    assert await paid.feed("paid", "mail", make=make).run(follow=False) == 0


async def test_two_that_feed_at_once_put_each_event_once(where: Path, paid: tidebook.Book) -> None:
    async with tidebook.open(where) as other:
        await asyncio.gather(*(book.feed("paid", "mail").run(follow=False) for book in (paid, other)))
    assert await totals(paid) == list(range(60))


async def test_a_zombie_that_still_delivers_puts_nothing_twice(paid: tidebook.Book) -> None:
    zombie = paid.feed("paid", "mail")
    events = [event async for event in paid.tags.read("paid")]
    await zombie._put(events[:20])
    await paid.feed("paid", "mail").run(follow=False)
    await zombie._put(events[20:40])
    assert await totals(paid) == list(range(60))


async def test_a_feeder_that_is_killed_after_its_put_does_not_put_again(where: Path, paid: tidebook.Book) -> None:
    for batches in (1, 2):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", FEEDER, str(where), str(batches))
        assert await process.wait() == -signal.SIGKILL
    await paid.feed("paid", "mail").run(follow=False)
    assert await totals(paid) == list(range(60))


async def test_a_feed_that_does_not_follow_puts_what_a_dead_member_still_holds(paid: tidebook.Book) -> None:
    async with paid.tags.subscribe("paid", "queue/mail"):
        assert await paid.feed("paid", "mail").run(follow=False) == 60


async def test_what_makes_no_entry_of_an_event_stops_the_feed_and_loses_nothing(
    paid: tidebook.Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(event: TaggedEvent) -> Entry | None:
        raise ValueError("no such order")

    monkeypatch.setattr(feed_module, "READ_AHEAD_MAX", 3)
    with pytest.raises(ValueError, match="no such order"):
        await asyncio.wait_for(paid.feed("paid", "mail", make=make).run(), 60)
    await paid.feed("paid", "mail").run(follow=False)
    assert await totals(paid) == list(range(60))


async def test_a_feed_follows_what_comes(paid: tidebook.Book) -> None:
    feed = paid.feed("paid", "mail")
    running = asyncio.create_task(feed.run())
    await paid.journal("orders").append("o-1", [Event({"total": 60}, tags={"paid"})])
    await replicated(paid)
    async with asyncio.timeout(60):
        while feed.put < 61:  # noqa: ASYNC110  nothing else reports it
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await totals(paid) == list(range(61))


def test_a_feed_from_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tidebook.open_sync(tmp_path / "data") as book:
        book.journal("orders").append("o-1", [Event({"total": 1}, tags={"paid"})])
    arguments = ["tidebook", "queue", "feed", "mail", "paid", "--once", "--book", str(tmp_path / "data")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == '{"queue":"mail","tag":"paid","put":0}\n'  # nothing is replicated yet


async def test_an_event_that_does_not_go_into_an_entry_is_referred_to(book: tidebook.Book) -> None:
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    events = [Event(payload, tags={"paid"}) for payload in (b"x" * 800_000, deep, "small")]
    await book.journal("orders").append("o", events)
    await replicated(book)
    assert await book.feed("paid", "mail").run(follow=False) == 3
    found = [job.data for job in await book.queue("mail").claim(10)]
    where = {"topic": "orders", "id": "o", "tag": "paid"}
    assert found == [
        {**where, "seq_nr": 1, "payload_left_out": True},
        {**where, "seq_nr": 2, "payload_left_out": True},
        {**where, "seq_nr": 3, "payload": "small"},
    ]


async def test_events_that_do_not_go_into_one_transaction_go_into_several(book: tidebook.Book) -> None:
    for _ in range(20):
        await book.journal("orders").append("o", [Event("x" * 900_000, tags={"paid"})])
    await replicated(book)
    assert await book.feed("paid", "mail").run(follow=False) == 20
    assert await book.feed("paid", "mail").run(follow=False) == 0
    assert [job.data["seq_nr"] for job in await book.queue("mail").claim(50)] == list(range(1, 21))
