"""Under any interleaving, lag and crash, a stream is the filtered journals: each event once, in order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tidebook.core.action import Mark
from tidebook.core.buckets import SIZES_MS
from tidebook.core.errors import Fenced
from tidebook.core.event import Event
from tidebook.core.key import partition_of
from tidebook.core.record import encode_record
from tidebook.log.port import Outgoing
from tidebook.replication.slice import SlicePlan, plan_slice
from tidebook.replication.ticks import tick
from tidebook.runtime.clock import SystemClock
from tidebook.tags.delayed_stream import DelayedStream
from tidebook.tags.event import TaggedEvent
from tidebook.tags.settings import TagSettings
from tidebook.tags.tags import Tags
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

TAGS = ("red", "blue")
PARTITIONS = 2
#: Two journals of each partition, so that one may be late.
JOURNALS = tuple(
    id
    for partition in range(PARTITIONS)
    for id in itertools.islice((f"j-{n}" for n in range(100) if partition_of(f"j-{n}", PARTITIONS) == partition), 2)
)
#: Where the log's time continues after a change of the bucket size: just before the change, at it, or later.
AHEAD_MS = (-1, 0, 90_000, 2 * SIZES_MS["hour"])
numbers = itertools.count()

appends = st.tuples(
    st.just("append"),
    st.integers(0, 3),
    st.lists(st.sets(st.sampled_from(TAGS)), min_size=1, max_size=3),
)
steps = st.one_of(
    appends,
    appends,
    st.tuples(st.just("delete"), st.integers(0, 3), st.integers(1, 6)),
    st.tuples(st.just("purge"), st.integers(0, 3)),
    st.tuples(st.just("plan"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("apply"), st.integers(0, 5)),
    st.tuples(st.just("replicate"), st.integers(1, 3)),
    st.tuples(st.just("tick")),
    st.tuples(st.just("read"), st.booleans()),
    st.tuples(st.just("append_ahead"), st.integers(0, 3), st.sets(st.sampled_from(TAGS)), st.integers(1, 60_000)),
    st.tuples(st.just("resize"), st.sampled_from(sorted(SIZES_MS)), st.sampled_from(AHEAD_MS), st.integers(0, 2)),
)
#: A delayed stream without a delay, for which every event may be late; it always searches as far back as necessary.
HASTY = TagSettings(consistency="delay", delay_s=0, back_track_interval_s=0, back_track_period_s=1e9)


class AheadClock(SystemClock):
    """The machine's clock, or the log time if that is later, because a delayed stream shows nothing newer."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms

    def reach(self, time_ms: int) -> None:
        self.ahead_ms += max(0, time_ms - self.now_ms())


class World:
    """A separate topic, slices that are planned but not applied, and readers that resume."""

    def __init__(self, book: Book, topic: str | None = None) -> None:
        self.book = book
        self.topic = topic or f"t-{next(numbers)}"
        self.names = {tag: f"{tag}-{self.topic}" for tag in TAGS}
        self.journal = book.journal(self.topic)
        self.plans: list[SlicePlan] = []
        self.seen: dict[str, list[TaggedEvent]] = {tag: [] for tag in TAGS}
        #: The events of streams that never end and that follow the clock.
        self.clock = AheadClock()
        self.behind_clock = Tags(store=book.store, clock=self.clock, settings=HASTY)
        self.delayed = {tag: self.delayed_stream(tag) for tag in TAGS}
        self.seen_late: dict[str, list[TaggedEvent]] = {tag: [] for tag in TAGS}
        self.payloads = itertools.count()

    async def step(self, name: str, *arguments: Any) -> None:
        await getattr(self, name)(*arguments)

    async def append(self, journal: int, tag_sets: list[set[str]]) -> None:
        events = [Event(next(self.payloads), tags={self.names[tag] for tag in tags}) for tags in tag_sets]
        await self.journal.append(JOURNALS[journal], events)

    async def delete(self, journal: int, to: int) -> None:
        await self.journal.delete(JOURNALS[journal], to=to)

    async def purge(self, journal: int) -> None:
        await self.journal.purge(JOURNALS[journal])

    async def plan(self, partition: int, limit: int) -> None:
        """Plan a slice like a replicator that is then paused or dies."""
        config = await self.book.store.topic_config(self.topic)
        assert config is not None
        pointer = await self.book.store.pointer(self.topic, partition)
        start = 0 if pointer is None else pointer.position.offset + 1
        end = await self.book.log.end(self.topic, partition)
        if start < end:
            page = await self.book.log.read(self.topic, partition, start=start, stop=end, limit=limit)
            self.plans.append(await plan_slice(self.book.store, self.topic, partition, page.records, config))

    async def apply(self, number: int) -> None:
        """Apply a planned slice, perhaps late, perhaps a second time."""
        if self.plans and (writes := self.plans[number % len(self.plans)].writes) is not None:
            try:
                await self.book.store.apply(writes)
            except Fenced:
                self.plans.pop(number % len(self.plans))

    async def replicate(self, limit: int) -> None:
        await replicate(self.book.log, self.book.store, self.topic, batch_records=limit, batches_max=1)

    async def tick(self) -> None:
        await tick(self.book.log, self.book.store, [self.topic])

    async def resize(self, size: str, ahead_ms: int, partition: int) -> None:
        """Change the bucket size, and let the time of one or both partitions advance to the change."""
        sizes = await self.book.tags.set_bucket_size(size)
        of = range(PARTITIONS) if partition == PARTITIONS else (partition,)
        await self.move_on(of, max(0, sizes.changes[-1].from_ms + ahead_ms))

    async def append_ahead(self, journal: int, tags: set[str], ahead_ms: int) -> None:
        """Append while the broker's clock is ahead of all others, and stays ahead.

        Changes of the bucket size have moved the book's time past the machine's clock, and a new topic starts there.
        """
        partition = partition_of(JOURNALS[journal], PARTITIONS)
        most_ms = (await self.book.tags.horizon()).most_ms
        time_ms = max(most_ms, self.book.clock.now_ms()) + ahead_ms
        await self.move_on([partition], time_ms)
        await self.append(journal, [tags])
        await self.move_on([partition], time_ms + 1)

    async def move_on(self, partitions: Iterable[int], time_ms: int) -> None:
        config = await self.book.store.topic_config(self.topic)
        assert config is not None
        value = encode_record(Mark(config.epoch, time_ms), limit_bytes=config.limit_bytes)
        for each in partitions:
            await self.book.log.append(Outgoing(self.topic, each, None, value))

    async def read(self, replicated: bool = False) -> None:
        """Continue both readers; if `replicated`, replicate new records before, but no tick after them."""
        if replicated:
            await replicate(self.book.log, self.book.store, self.topic)
        for tag, seen in self.seen.items():
            after = seen[-1].tag_offset if seen else None
            seen += await self.events(tag, after)
        self.clock.reach((await self.book.tags.horizon([self.topic])).most_ms + 1)
        for tag, seen in self.seen_late.items():
            seen += [TaggedEvent(row) async for row in self.delayed[tag].read_new()]

    def delayed_stream(self, tag: str) -> DelayedStream:
        return DelayedStream(
            self.names[tag], None, 0, from_beginning=True, topics=frozenset([self.topic]),
            store=self.book.store, clock=self.clock, settings=HASTY, metrics=self.book.metrics,
        )  # fmt: skip

    async def events(self, tag: str, after: str | None = None) -> list[TaggedEvent]:
        return [event async for event in self.book.tags.read(self.names[tag], after=after, topics=[self.topic])]

    async def settle(self) -> None:
        await replicate(self.book.log, self.book.store, self.topic)
        await self.tick()
        await replicate(self.book.log, self.book.store, self.topic)

    async def play(self, history: list[tuple[Any, ...]]) -> None:
        """Run a history, then apply its late slices, and check what streams return."""
        await self.append(0, [{"red"}])
        for step in history:
            await self.step(*step)
        await self.settle()
        await self.read()
        for number in range(len(self.plans)):
            await self.apply(number)  # slices that zombies write late
        await self.check()

    async def check(self) -> None:
        for tag in TAGS:
            below_horizon = await self.events(tag)
            await self.check_seen(tag, below_horizon, self.seen[tag])
            name = self.names[tag]
            behind_clock = [event async for event in self.behind_clock.read(name, topics=[self.topic])]
            assert behind_clock == below_horizon, "after all is replicated, both kinds of stream have the same events"
            await self.check_seen(tag, behind_clock, self.seen_late[tag])

    async def check_seen(self, tag: str, events: list[TaggedEvent], seen: list[TaggedEvent]) -> None:
        expected = {}
        for id in JOURNALS:
            of = [event async for event in self.journal.read(id) if self.names[tag] in event.tags]
            expected[id] = [(event.seq_nr, event.payload) for event in of]
            mine = [event for event in events if event.id == id]
            assert [(event.seq_nr, event.payload) for event in mine] == expected[id]
            tag_numbers = [event.tag_seq_nr for event in mine]
            assert tag_numbers == list(range(tag_numbers[0], tag_numbers[0] + len(mine))) if mine else True
        payloads = [event.payload for event in seen]
        assert len(set(payloads)) == len(payloads), "a reader that resumes gets each event once"
        assert {event.payload for event in events} <= set(payloads), (
            "a reader that resumes misses no event that still exists"
        )
        for id in expected:
            of_id = [event.payload for event in seen if event.id == id]
            assert of_id == sorted(of_id), "the events of a journal are in order"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Book]]:
    folder: Path = tmp_path_factory.mktemp("book")
    book = Book(Settings(folder, {"journal": Section(None, {"partitions": PARTITIONS})}))
    with asyncio.Runner() as runner:
        runner.run(book.__aenter__())
        yield runner, book
        runner.run(book.__aexit__(None, None, None))


#: Steps in which a stream without a horizon, or without backtracking, would lose an event.
LATE = [("append_ahead", 2, {"red"}, 5000), ("read", True), ("append", 0, [{"red"}])]


@example(history=LATE)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=st.lists(steps, min_size=15, max_size=40))
def test_a_stream_is_the_filtered_journals(opened: tuple[asyncio.Runner, Book], history: list[tuple[Any, ...]]) -> None:
    runner, book = opened

    async def go() -> None:
        await World(book).play(history)

    runner.run(go())


def test_a_thousand_tags_each_have_their_stream(opened: tuple[asyncio.Runner, Book]) -> None:
    runner, book = opened

    async def go() -> None:
        names = [f"thousand-{n:04}" for n in range(1000)]
        for i in range(0, 1000, 10):
            await book.journal("many").append(f"j-{i % 7}", [Event(name, tags={name}) for name in names[i : i + 10]])
        await replicate(book.log, book.store, "many")
        await tick(book.log, book.store, ["many"])
        await replicate(book.log, book.store, "many")
        for name in names:
            found = [event.payload async for event in book.tags.read(name, topics=["many"])]
            assert found == [name]
        assert {name async for name in book.tags.list()} >= set(names)

    runner.run(go())
