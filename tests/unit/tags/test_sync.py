"""Streams by tag and groups for threads without an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import tidebook
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.core.event import Event
from tidebook.replication.ticks import tick
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings
from tidebook.wiring.sync import SyncBook


async def fill(folder: Path, count: int) -> None:
    async with Book(Settings(folder, {"journal": Section(None, {"partitions": 1})})) as book:
        for n in range(count):
            await book.journal("t").append(f"j-{n % 50}", [Event(n, tags={"paid"})])
        await replicate(book.log, book.store, "t")
        await tick(book.log, book.store, ["t"])
        await replicate(book.log, book.store, "t")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asyncio.run(fill(tmp_path, 100))
    return tmp_path


def test_every_method_works_without_a_loop(folder: Path) -> None:
    with tidebook.open_sync(folder) as book:
        events = list(book.tags.read("paid"))
        assert [event.payload for event in events] == list(range(100))
        assert list(book.tags.read("paid", after=events[-3].tag_offset)) == events[-2:]
        assert list(book.tags.read("paid", after=datetime(2999, 1, 1, tzinfo=UTC))) == []
        assert list(book.tags.list()) == ["paid"]
        assert book.tags.horizon().time_ms > events[-1].place.time_ms
        assert book.tags.rebuild("paid").written == 100
        assert book.tags.buckets().changes[-1].size == "hour"
        assert book.tags.set_bucket_size("minute").changes[-1].size == "minute"


def test_a_group_continues_after_its_committed_offset(folder: Path) -> None:
    with tidebook.open_sync(folder) as book:
        with book.tags.subscribe("paid", "mail", follow=False) as events:
            for event in events:
                events.commit(event)
                if event.payload == 49:
                    break
        with book.tags.subscribe("paid", "mail", follow=False) as events:
            assert [event.payload for event in events] == list(range(50, 100))


def test_a_slow_member_is_not_presumed_dead_and_releases_events_that_it_has_not_begun(folder: Path) -> None:
    """A second member joins in the middle: both continue, and no event is handled by both."""
    done: dict[str, list[int]] = {"first": [], "second": []}
    joined, over = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def work(name: str, book: SyncBook) -> None:
        try:
            with book.tags.subscribe("paid", "mail", lease_s=0.6) as events:
                for event in events:
                    done[name].append(event.payload)
                    time.sleep(0.02)
                    events.commit(event)  # raises Fenced if another member owns it
                    if len(done["first"]) == 10:
                        joined.set()
        except (Unavailable, OutcomeUnknown) as error:
            if not over.is_set():
                failed.append(error)
        except BaseException as error:
            failed.append(error)

    with tidebook.open_sync(folder) as one, tidebook.open_sync(folder) as other:
        threads = [
            threading.Thread(target=work, args=each, daemon=True) for each in (("first", one), ("second", other))
        ]
        threads[0].start()
        assert joined.wait(60)
        threads[1].start()
        deadline = time.monotonic() + 60
        while sum(map(len, done.values())) < 100 and not failed and time.monotonic() < deadline:
            time.sleep(0.02)
        over.set()
    for thread in threads:  # a closed book ends them
        thread.join(60)
        assert not thread.is_alive()
    assert failed == []
    assert sorted(done["first"] + done["second"]) == list(range(100))
    assert done["second"]


def test_a_closed_book_ends_a_member_with_an_error(folder: Path) -> None:
    with tidebook.open_sync(folder) as book:
        events = iter(book.tags.subscribe("paid", "mail", follow=False).__enter__())
        next(events)
    with pytest.raises(Unavailable):
        next(events)
