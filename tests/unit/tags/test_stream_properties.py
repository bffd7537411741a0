"""Whatever the interleaving, lag and crash, the stream is the filter of the journals, each event once, in order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidebook.core.errors import Fenced
from tidebook.core.event import Event
from tidebook.pipeline.slice import Plan, plan_slice
from tidebook.tags.event import TaggedEvent
from tidebook.tags.ticks import tick
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings

TAGS = ("red", "blue")
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
    st.tuples(st.just("read")),
)


class World:
    """A topic of its own, slices that were planned and not applied yet, and a reader that resumes."""

    def __init__(self, book: Book, topic: str | None = None) -> None:
        self.book = book
        self.topic = topic or f"t-{next(numbers)}"
        self.names = {tag: f"{tag}-{self.topic}" for tag in TAGS}
        self.journal = book.journal(self.topic)
        self.plans: list[Plan] = []
        self.seen: dict[str, list[TaggedEvent]] = {tag: [] for tag in TAGS}
        self.payloads = itertools.count()

    async def step(self, name: str, *arguments: Any) -> None:
        await getattr(self, name)(*arguments)

    async def append(self, journal: int, tag_sets: list[set[str]]) -> None:
        events = [Event(next(self.payloads), tags={self.names[tag] for tag in tags}) for tags in tag_sets]
        await self.journal.append(f"j-{journal}", events)

    async def delete(self, journal: int, to: int) -> None:
        await self.journal.delete(f"j-{journal}", to=to)

    async def purge(self, journal: int) -> None:
        await self.journal.purge(f"j-{journal}")

    async def plan(self, partition: int, limit: int) -> None:
        """A replicator that plans, and then is paused, or dies."""
        facts = await self.book.store.facts(self.topic)
        assert facts is not None
        pointer = await self.book.store.pointer(self.topic, partition)
        start = 0 if pointer is None else pointer.position.offset + 1
        end = await self.book.log.end(self.topic, partition)
        if start < end:
            page = await self.book.log.read(self.topic, partition, start=start, stop=end, limit=limit)
            self.plans.append(await plan_slice(self.book.store, self.topic, partition, page.records, facts))

    async def apply(self, number: int) -> None:
        """It wakes up, late perhaps, and perhaps a second time."""
        if self.plans and (writes := self.plans[number % len(self.plans)].writes) is not None:
            try:
                await self.book.store.apply(writes)
            except Fenced:
                self.plans.pop(number % len(self.plans))

    async def replicate(self, limit: int) -> None:
        await replicate(self.book.log, self.book.store, self.topic, batch_records=limit, batches_max=1)

    async def tick(self) -> None:
        await tick(self.book.log, self.book.store, [self.topic])

    async def read(self) -> None:
        for tag, seen in self.seen.items():
            after = seen[-1].tag_offset if seen else None
            seen += await self.events(tag, after)

    async def events(self, tag: str, after: str | None = None) -> list[TaggedEvent]:
        return [event async for event in self.book.tags.read(self.names[tag], after=after, topics=[self.topic])]

    async def settle(self) -> None:
        await replicate(self.book.log, self.book.store, self.topic)
        await self.tick()
        await replicate(self.book.log, self.book.store, self.topic)

    async def play(self, history: list[tuple[Any, ...]]) -> None:
        """Live through a history, with all its zombies behind it, and check what streams show."""
        await self.append(0, [{"red"}])
        for step in history:
            await self.step(*step)
        await self.settle()
        await self.read()
        for number in range(len(self.plans)):
            await self.apply(number)  # zombies, after everything
        await self.check()

    async def check(self) -> None:
        for tag, seen in self.seen.items():
            events = await self.events(tag)
            expected = {}
            for id in [f"j-{n}" for n in range(4)]:
                of = [event async for event in self.journal.read(id) if self.names[tag] in event.tags]
                expected[id] = [(event.seq_nr, event.payload) for event in of]
                mine = [event for event in events if event.id == id]
                assert [(event.seq_nr, event.payload) for event in mine] == expected[id]
                tag_numbers = [event.tag_seq_nr for event in mine]
                assert tag_numbers == list(range(tag_numbers[0], tag_numbers[0] + len(mine))) if mine else True
            payloads = [event.payload for event in seen]
            assert len(set(payloads)) == len(payloads), "a reader that resumes gets each event once"
            assert {event.payload for event in events} <= set(payloads), "and misses none that is still there"
            for id in expected:
                of_id = [event.payload for event in seen if event.id == id]
                assert of_id == sorted(of_id), "in order per journal"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Book]]:
    folder: Path = tmp_path_factory.mktemp("book")
    book = Book(Settings(folder, {"journal": Section(None, {"partitions": 2})}))
    with asyncio.Runner() as runner:
        runner.run(book.__aenter__())
        yield runner, book
        runner.run(book.__aexit__(None, None, None))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=st.lists(steps, min_size=1, max_size=30))
def test_the_stream_is_the_filter_of_the_journals(
    opened: tuple[asyncio.Runner, Book], history: list[tuple[Any, ...]]
) -> None:
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
