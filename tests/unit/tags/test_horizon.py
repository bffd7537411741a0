"""The horizon is the smallest time of all pointers; a partition that was never replicated holds everything back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tidebook
from tidebook.core.errors import Unavailable
from tidebook.core.event import Event
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.tags.horizon import (
    FOLLOWED_SETTING,
    NEVER_MS,
    RENEW_MS,
    Horizon,
    Horizons,
    HorizonWait,
    horizon_of,
)
from tidebook.testing.clock import ManualClock
from tidebook.testing.replicating import replicate_slice
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings


def pointer(time_ms: int) -> Pointer:
    return Pointer(Position(1, 0), time_ms)


def test_the_least_time_is_the_horizon_and_its_partition_is_named() -> None:
    found = horizon_of({"a": 2, "b": 1}, {"a": {0: pointer(50), 1: pointer(30)}, "b": {0: pointer(40)}})
    assert found == Horizon(30, 50, "a", 1)


def test_a_partition_that_was_never_replicated_holds_everything_back() -> None:
    assert horizon_of({"a": 2}, {"a": {0: pointer(50)}}) == Horizon(NEVER_MS, 50, "a", 1)


def test_a_topic_registered_after_the_pointers_were_read_holds_everything_back() -> None:
    assert horizon_of({"a": 1, "new": 1}, {"a": {0: pointer(50)}}).topic == "new"


def test_without_topics_there_is_nothing_to_deliver() -> None:
    assert horizon_of({}, {}) == Horizon(NEVER_MS, NEVER_MS)


class Registry:
    """A store's topics and pointers; it records calls, and runs the callback of a call once, before it returns."""

    def __init__(self, **times_ms: int) -> None:
        self.times_ms = times_ms
        self.asked: list[str] = []
        self.callbacks: dict[str, Callable[[], None]] = {}

    def _note(self, what: str) -> None:
        self.asked.append(what)
        self.callbacks.pop(what, lambda: None)()

    async def topics(self) -> list[str]:
        self._note("topics")
        return sorted(self.times_ms)

    async def pointers(self, topic: str) -> dict[int, Pointer]:
        found = {} if self.times_ms[topic] == NEVER_MS else {0: pointer(self.times_ms[topic])}
        self._note(f"pointers {topic}")
        return found

    async def topic_config(self, topic: str) -> TopicConfig:
        self._note(f"config {topic}")
        return TopicConfig(topic_id="x", partitions=1)


async def test_a_second_read_requests_only_pointers_and_topic_names() -> None:
    registry = Registry(a=50, b=40)
    horizons = Horizons(registry)  # type: ignore[arg-type]
    assert await horizons.read() == Horizon(40, 50, "b", 0)
    registry.asked.clear()
    registry.times_ms["b"] = 60
    assert await horizons.read() == Horizon(50, 60, "a", 0)
    assert registry.asked == ["pointers a", "pointers b", "topics"]
    registry.asked.clear()
    assert await horizons.read(["b"]) == Horizon(60, 60, "b", 0)
    assert registry.asked == ["pointers b"]


async def test_a_topic_registered_while_pointers_are_read_holds_the_horizon_back() -> None:
    registry = Registry(a=50)
    horizons = Horizons(registry)  # type: ignore[arg-type]
    assert (await horizons.read()).time_ms == 50
    registry.callbacks["pointers a"] = lambda: registry.times_ms.update(new=NEVER_MS)
    assert await horizons.read() == Horizon(NEVER_MS, 50, "new", 0)
    registry.times_ms["new"] = 45
    assert await horizons.read() == Horizon(45, 50, "new", 0)


async def test_a_topic_registered_since_the_last_read_counts_at_once() -> None:
    registry = Registry(a=50)
    horizons = Horizons(registry)  # type: ignore[arg-type]
    await horizons.read()
    registry.times_ms["new"] = 45
    assert await horizons.read() == Horizon(45, 50, "new", 0)


class SlowRegistry:
    """A store and log that can hold back single responses; a pointer's offset is its time."""

    def __init__(self, **times_ms: int) -> None:
        self.times_ms = times_ms
        self.held: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}
        self.epoch = 1
        self.configs_read = 0
        self.is_down = False

    def hold(self, question: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Return an event that is set when the call is made, and one that lets it return."""
        self.held[question] = asyncio.Event(), asyncio.Event()
        return self.held[question]

    async def _answer(self, question: str) -> None:
        if question in self.held:
            asked, answered = self.held.pop(question)
            asked.set()
            await answered.wait()

    async def topics(self) -> list[str]:
        return sorted(self.times_ms)

    async def pointers(self, topic: str) -> dict[int, Pointer]:
        if self.is_down:
            raise Unavailable("the store is down")
        time_ms = self.times_ms[topic]
        await self._answer(f"pointers {topic}")
        return {0: Pointer(Position(self.epoch, time_ms), time_ms)}

    async def topic_config(self, topic: str) -> TopicConfig:
        self.configs_read += 1
        await self._answer(f"config {topic}")
        return TopicConfig(topic_id="x", partitions=1, epoch=self.epoch)

    async def start(self, topic: str, partition: int) -> int:
        return 0

    async def end(self, topic: str, partition: int) -> int:
        return 100


async def test_a_topic_stays_in_the_horizon_while_another_stream_rereads_its_partitions() -> None:
    """A defect that is fixed: when reads of its pointers overtook each other, the other stream left the topic out."""
    registry: Any = SlowRegistry(late=30, before=50)
    horizons = Horizons(registry)
    await horizons.read()
    before_asked, before_answered = registry.hold("config before")
    late_asked, late_answered = registry.hold("config late")
    async with asyncio.TaskGroup() as streams:
        registry.times_ms["before"] = 49  # an outdated response, older than the first one
        one = streams.create_task(horizons.read())
        await before_asked.wait()
        registry.times_ms["late"] = 29
        other = streams.create_task(horizons.read())
        await late_asked.wait()
        before_answered.set()
        assert await one == Horizon(30, 49, "late", 0)
        late_answered.set()
        assert await other == Horizon(29, 49, "late", 0)


async def test_the_lag_of_a_topic_is_found_while_another_stream_rereads_its_partitions() -> None:
    registry: Any = SlowRegistry(a=30)
    horizons = Horizons(registry, registry)
    await horizons.read()
    pointers_asked, pointers_answered = registry.hold("pointers a")
    async with asyncio.TaskGroup() as streams:
        lagging = streams.create_task(horizons.lagging())
        await pointers_asked.wait()
        registry.times_ms["a"] = 29
        config_asked, config_answered = registry.hold("config a")
        other = streams.create_task(horizons.read())
        await config_asked.wait()
        pointers_answered.set()
        assert await lagging == {("a", 0): (Position(1, 30), 69)}
        config_answered.set()
        assert (await other).time_ms == 29


async def test_counting_the_lag_reads_a_configuration_once_per_epoch() -> None:
    registry: Any = SlowRegistry(a=30)
    horizons = Horizons(registry, registry)
    await horizons.read()
    registry.configs_read = 0
    for _ in range(5):
        assert await horizons.lagging() == {("a", 0): (Position(1, 30), 69)}
    assert registry.configs_read == 1
    registry.epoch = 2  # a stream that kept its configuration would end with Fenced
    assert await horizons.lagging() == {("a", 0): (Position(2, 30), 69)}
    assert registry.configs_read == 2


async def test_the_streams_of_a_book_share_one_request_for_ticks() -> None:
    registry: Any = SlowRegistry(a=30)
    clock, sets = ManualClock(), []

    async def setting(name: str) -> str | None:
        return None

    async def set_setting(name: str, value: str, *, expected: str | None) -> bool:
        sets.append(name)
        return True

    registry.setting, registry.set_setting = setting, set_setting
    horizons = Horizons(registry, registry)
    waits = [HorizonWait(registry, clock, horizons, None, stream=f"stream {n}") for n in range(3)]
    for asked in (1, 1, 2):
        await asyncio.gather(*(each.ask_for_ticks() for each in waits))
        assert sets == [FOLLOWED_SETTING] * asked
        clock.advance(RENEW_MS // 2)


async def test_the_check_for_stalls_does_not_end_a_stream_while_the_store_is_down() -> None:
    registry: Any = SlowRegistry(a=30)

    async def wait_any(*, timeout_s: float, since: int) -> int:
        return since + 1

    registry.wait_any = wait_any
    wait = HorizonWait(registry, ManualClock(), Horizons(registry, registry), None, stream="a stream")
    registry.is_down = True
    await wait.wait(1.0, delivered=False)
    assert wait.waiting is None


async def test_the_partitions_of_a_recreated_topic_are_read_again(tmp_path: Path) -> None:
    async def fill(partitions: int) -> None:
        async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": partitions})})) as book:
            for n in range(9):
                await book.journal("t").append(f"j-{n}", [Event(n)])
            await replicate_partition(book, "t", 0)  # and no other partition

    await fill(1)
    async with tidebook.open(tmp_path) as book:
        horizons = Horizons(book.store)
        for topics in (None, ["t"]):
            assert (await horizons.read(topics)).time_ms > 0
        await book.delete_topic("t")
        assert (await horizons.read()).topic is None
        await fill(2)
        for topics in (None, ["t"]):
            assert await horizons.read(topics) == Horizon(NEVER_MS, (await horizons.read()).most_ms, "t", 1)


async def replicate_partition(book: Book, topic: str, number: int) -> None:
    config = await book.store.topic_config(topic)
    assert config is not None
    end = await book.log.end(topic, number)
    records = (await book.log.read(topic, number, start=0, stop=end)).records
    await replicate_slice(book.store, topic, number, records, config, start=0, stop=end)
