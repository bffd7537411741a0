"""Delayed streams: late events are found, gaps are filled or reported, nothing is delivered twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tidebook.core.errors import MissingTaggedEvent
from tidebook.core.event import Event
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication_plan import EventRow, TagPosition, TagRow
from tidebook.runtime.metrics import Metrics
from tidebook.tags.delayed_stream import DelayedStream
from tidebook.tags.settings import TagSettings
from tidebook.tags.tags import Tags
from tidebook.testing.clock import ManualClock
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS + 60_000


class Lagging:
    """A store as another node sees it: some tag rows and heads have not arrived yet."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.hidden: Callable[[TagRow], bool] = lambda row: False
        self.headless = False
        self.waited = self.pages = self.events_read = 0
        #: A callback that is awaited after the first page of a journal's events is read.
        self.on_events: Callable[[], Awaitable[None]] | None = None
        self.on_wait: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def head(self, key: Key) -> Head | None:
        return None if self.headless else await self._store.head(key)

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        rows: Sequence[EventRow] = await self._store.events(key, head, after=after, to=to, limit=min(limit, 2))
        self.events_read += len(rows)
        if self.on_events is not None:
            happens, self.on_events = self.on_events, None
            await happens()
        return rows

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        self.waited += 1
        self.on_wait()
        return 0

    async def tag_rows(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        self.pages += 1
        while rows := await self._store.tag_rows(tag, after=after, from_ms=from_ms, until_ms=until_ms, limit=limit):
            if seen := [row for row in rows if not self.hidden(row)]:
                return seen
            after = rows[-1].place
        return []


class World:
    def __init__(self, book: Book, clock: ManualClock) -> None:
        self.book, self.clock, self.metrics = book, clock, Metrics()
        self.store = Lagging(book.store)

    async def append(self, id: str, *payloads: object, step_ms: int = 1000) -> None:
        for payload in payloads:
            await self.book.journal("t").append(id, [Event(payload, tags={"paid"})])
            self.clock.advance(step_ms)
        await replicate(self.book.log, self.book.store, "t")

    def tags(self, **settings: Any) -> Tags:
        return Tags(
            store=self.store,
            clock=self.clock,
            metrics=self.metrics,
            settings=TagSettings(consistency="delay", page_events=3, **settings),
        )

    async def read(self, after: str | datetime | None = None, **settings: Any) -> list[object]:
        return [event.payload async for event in self.tags(**settings).read("paid", after=after)]

    def count(self, name: str) -> float:
        return self.metrics.counted(name)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    clock = ManualClock(START_MS)
    async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": 2})}), clock=clock) as book:
        yield World(book, clock)


async def test_a_query_returns_only_events_older_than_the_delay(world: World) -> None:
    await world.append("a", 1)
    assert await world.read() == []
    world.clock.advance(5000)
    assert await world.read() == [1]


async def test_a_gap_is_filled_from_the_journal_before_the_events_held_back(world: World) -> None:
    await world.append("a", 1, 2, 3, 4)
    world.clock.advance(60_000)
    world.store.hidden = lambda row: row.tag_seq_nr in (2, 3)
    assert await world.read() == [1, 2, 3, 4]
    assert world.count("tags_gaps_found") == 1


async def test_a_gap_older_than_two_buckets_is_filled(world: World) -> None:
    await world.append("a", 1, 2)
    world.clock.advance(5 * HOUR_MS)
    await world.append("a", 3)
    world.clock.advance(60_000)
    world.store.hidden = lambda row: row.tag_seq_nr == 2
    assert await world.read() == [1, 2, 3]


async def test_deleted_numbers_are_not_a_gap(world: World) -> None:
    await world.append("a", 1, 2, 3)
    await world.book.journal("t").delete("a", to=2)
    await world.append("a", 4)
    world.clock.advance(60_000)
    assert await world.read() == [3, 4]
    assert world.store.waited == 0


async def test_a_missing_event_fails_the_stream_and_names_where_to_resume(world: World) -> None:
    await world.append("a", 1, 2, 3)
    world.clock.advance(60_000)
    world.store.hidden = lambda row: row.tag_seq_nr == 2
    world.store.headless = True
    world.store.on_wait = lambda: world.clock.advance(2500)
    seen = []

    async def read() -> None:
        async for event in world.tags().read("paid"):
            seen.append(event)

    with pytest.raises(MissingTaggedEvent) as raised:
        await read()
    assert [event.payload for event in seen] == [1]
    assert raised.value.missing == (2, 2)
    assert raised.value.last_known_offset == seen[0].tag_offset
    world.store.hidden = lambda row: False
    assert await world.read(after=raised.value.last_known_offset) == [2, 3]


async def test_a_held_back_event_is_delivered_when_the_missing_one_arrives(world: World) -> None:
    await world.append("a", 1, 2, 3)
    world.clock.advance(60_000)
    world.store.hidden = lambda row: row.tag_seq_nr == 2
    world.store.headless = True

    def arrive() -> None:
        world.store.hidden = lambda row: False

    world.store.on_wait = arrive
    assert await world.read() == [1, 2, 3]


@pytest.mark.parametrize("period_s", [90.0, "max"])
async def test_a_late_event_that_is_the_only_one_of_its_journal_is_found_by_backtracking(
    world: World, period_s: float | str
) -> None:
    await world.append("late", 1)
    world.clock.advance(59_000)  # a node's clock that is a minute slow
    await world.append("a", 2)
    world.clock.advance(10_000)
    world.store.hidden = lambda row: row.id == "late"
    seen = []

    def arrive() -> None:
        world.store.hidden = lambda row: False
        world.clock.advance(1500)

    world.store.on_wait = arrive
    stream = world.tags(back_track_period_s=period_s).read("paid", follow=True)
    async for event in stream:
        seen.append(event.payload)
        if len(seen) == 2:
            break
    assert seen == [2, 1]
    assert world.count("tags_delayed_found") == 1
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_restarted_query_scans_the_current_bucket_and_delivers_nothing_twice(world: World) -> None:
    await world.append("a", 1, 2, 3)
    world.clock.advance(10_000)
    events = [event async for event in world.tags().read("paid")]
    await world.append("a", 4)
    await world.append("b", 5)
    world.clock.advance(10_000)
    world.store.headless = True
    for n, event in enumerate(events):
        assert await world.read(after=event.tag_offset) == [1, 2, 3, 4, 5][n + 1 :]
    assert world.store.waited == 0


async def test_after_a_restart_a_late_event_after_the_offset_is_found(world: World) -> None:
    await world.append("a", 1, 2, 3)
    world.clock.advance(10_000)
    first, *_ = [event async for event in world.tags().read("paid")]
    world.store.hidden = lambda row: row.tag_seq_nr == 2
    assert await world.read(after=first.tag_offset) == [2, 3]


async def test_an_event_of_a_journal_first_seen_in_a_later_bucket_is_delivered_after_a_wait(world: World) -> None:
    await world.append("a", 1, 2)
    world.clock.advance(3 * HOUR_MS)
    begin = datetime.fromtimestamp(world.clock.now_ms() / 1000, UTC)
    await world.append("a", 3)
    world.clock.advance(10_000)
    assert await world.read(after=begin) == [3]
    assert world.store.waited == 0, "the journal shows that nothing is missing"
    world.store.headless = True
    world.store.on_wait = lambda: world.clock.advance(200)
    assert await world.read(after=begin) == [3]
    assert world.store.waited == 3


async def test_a_purged_incarnation_is_not_a_gap_of_the_next(world: World) -> None:
    await world.append("a", 1, 2)
    await world.book.journal("t").purge("a")
    await world.append("a", 3, 4)
    world.clock.advance(60_000)
    assert await world.read() == [3, 4]


async def test_deletes_during_a_gap_search_do_not_shift_the_numbers(world: World) -> None:
    """A delete between the reads of two pages removes events of both."""
    await world.append("a", 1, 2, 3, 4, 5, 6)
    world.clock.advance(60_000)
    world.store.hidden = lambda row: row.tag_seq_nr in (2, 3, 4, 5)

    async def delete() -> None:
        await world.book.journal("t").delete("a", to=4)
        await replicate(world.book.log, world.book.store, "t")

    world.store.on_events = delete
    assert await world.read() == [1, 5, 6]
    assert world.store.waited == 1


async def test_an_incarnation_that_starts_during_a_gap_search_is_not_mistaken_for_the_previous_one(
    world: World,
) -> None:
    await world.append("a", 1, 2, 3, 4)
    world.clock.advance(60_000)
    world.store.hidden = lambda row: row.tag_seq_nr in (2, 3)

    async def recreate() -> None:
        await world.book.journal("t").purge("a")
        await world.append("a", "x", "y", "z")
        world.store.hidden = lambda row: False

    world.store.on_events = recreate
    assert await world.read() == [1, 4]
    world.clock.advance(60_000)
    assert await world.read() == ["x", "y", "z"]


async def test_a_stream_from_the_middle_does_not_read_its_buckets_once_per_journal(world: World) -> None:
    for payload in (1, 2, 3):
        for n in range(20):
            await world.append(f"j-{n}", payload, step_ms=1)
    await world.book.journal("t").delete("j-0", to=1)
    await replicate(world.book.log, world.book.store, "t")
    world.clock.advance(3 * HOUR_MS)
    events = [event async for event in world.tags().read("paid")]
    world.store.pages = 0
    assert len(await world.read(after=events[20].tag_offset)) == len(events) - 21
    assert world.store.pages < 40, "the pages of the stream, and a few for backtracking"


async def test_a_stream_of_some_topics_continues_after_rows_of_others(world: World) -> None:
    await world.append("a", *range(30))
    await world.book.journal("other").append("b", [Event("mine", tags={"paid"})])
    await replicate(world.book.log, world.book.store, "other")
    world.clock.advance(60_000)
    stream = world.tags(back_track_period_s=0.0).read("paid", topics=["other"], follow=True)
    assert (await anext(stream)).payload == "mine"
    await world.append("a", "left out")
    world.clock.advance(60_000)
    waits: list[int] = []

    def waited() -> None:
        waits.append(world.store.pages)
        if len(waits) == 5:
            raise TimeoutError

    world.store.on_wait = waited
    with pytest.raises(TimeoutError):
        await anext(stream)
    assert waits[-1] - waits[-2] <= 2, "no page is read twice"


@pytest.mark.parametrize("deleted", [0, 50])
async def test_a_stream_from_the_end_of_a_long_journal_does_not_read_it(
    world: World, monkeypatch: pytest.MonkeyPatch, deleted: int
) -> None:
    monkeypatch.setattr("tidebook.tags.delayed_stream.NEAR_EVENTS", 4)
    for first in range(0, 400, 100):
        await world.book.journal("t").append("a", [Event(n, tags={"paid"}) for n in range(first, first + 100)])
        world.clock.advance(HOUR_MS)
    if deleted:
        await world.book.journal("t").delete("a", to=deleted)
    await world.append("a", "x", "y", "z")
    world.clock.advance(3 * HOUR_MS)
    events = [event async for event in world.tags().read("paid")]
    assert len(events) == 403 - deleted
    world.store.events_read = 0
    for back in range(1, 6):
        after = events[-1 - back].tag_offset
        assert await world.read(after) == [event.payload for event in events[-back:]]
    assert world.store.events_read <= 40
    middle = events[200 - deleted]
    world.store.events_read = 0
    world.store.hidden = lambda row: row.tag_seq_nr in (203, 204)
    assert await world.read(middle.tag_offset) == [event.payload for event in events[201 - deleted :]]
    assert world.store.events_read <= 40


async def test_the_memory_of_a_stream_that_catches_up_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.tags.delayed_stream.JOURNALS_MAX", 10)
    for hour in range(8):
        await world.append(f"j-{hour}", hour, step_ms=1)
        for n in range(6):
            await world.append(f"j-{hour}-{n}", hour, step_ms=1)
        world.clock.advance(HOUR_MS)
    remembered = 0
    forget = DelayedStream._evict_journals

    async def noted(stream: DelayedStream) -> None:
        nonlocal remembered
        await forget(stream)
        remembered = max(remembered, len(stream._last))

    monkeypatch.setattr(DelayedStream, "_evict_journals", noted)
    assert await world.read() == [hour for hour in range(8) for _ in range(7)]
    assert 10 <= remembered <= 10 + 2 * 7
