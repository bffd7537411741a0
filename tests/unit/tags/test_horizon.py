"""The horizon is the least time of all partitions; one that was never replicated holds everything."""

from __future__ import annotations

from collections.abc import Callable

from tidebook.core.position import Position
from tidebook.core.replication import Pointer
from tidebook.core.topic import TopicFacts
from tidebook.tags.horizon import NEVER_MS, Horizon, Horizons, horizon_of


def pointer(time_ms: int) -> Pointer:
    return Pointer(Position(1, 0), time_ms)


def test_the_least_time_is_the_horizon_and_its_partition_is_named() -> None:
    found = horizon_of({"a": 2, "b": 1}, {"a": {0: pointer(50), 1: pointer(30)}, "b": {0: pointer(40)}})
    assert found == Horizon(30, 50, "a", 1)


def test_a_partition_that_was_never_replicated_holds_everything() -> None:
    assert horizon_of({"a": 2}, {"a": {0: pointer(50)}}) == Horizon(NEVER_MS, 50, "a", 1)


def test_a_topic_that_was_registered_after_the_pointers_were_read_holds_everything() -> None:
    assert horizon_of({"a": 1, "new": 1}, {"a": {0: pointer(50)}}).topic == "new"


def test_without_topics_there_is_nothing_to_deliver() -> None:
    assert horizon_of({}, {}) == Horizon(NEVER_MS, NEVER_MS)


class Registry:
    """A store's topics with their pointers; it notes what it is asked, and things happen in between."""

    def __init__(self, **times_ms: int) -> None:
        self.times_ms = times_ms
        self.asked: list[str] = []
        self.then: dict[str, Callable[[], None]] = {}

    def _note(self, what: str) -> None:
        self.asked.append(what)
        self.then.pop(what, lambda: None)()

    async def topics(self) -> list[str]:
        self._note("topics")
        return sorted(self.times_ms)

    async def pointers(self, topic: str) -> dict[int, Pointer]:
        found = {} if self.times_ms[topic] == NEVER_MS else {0: pointer(self.times_ms[topic])}
        self._note(f"pointers {topic}")
        return found

    async def facts(self, topic: str) -> TopicFacts:
        self._note(f"facts {topic}")
        return TopicFacts(topic_id="x", partitions=1)


async def test_a_horizon_that_is_read_again_asks_for_pointers_and_then_for_the_names_alone() -> None:
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


async def test_a_topic_that_is_registered_while_pointers_are_read_holds_the_horizon() -> None:
    registry = Registry(a=50)
    horizons = Horizons(registry)  # type: ignore[arg-type]
    assert (await horizons.read()).time_ms == 50
    registry.then["pointers a"] = lambda: registry.times_ms.update(new=NEVER_MS)
    assert await horizons.read() == Horizon(NEVER_MS, 50, "new", 0)
    registry.times_ms["new"] = 45
    assert await horizons.read() == Horizon(45, 50, "new", 0)


async def test_a_topic_that_came_since_the_last_time_is_looked_at_at_once() -> None:
    registry = Registry(a=50)
    horizons = Horizons(registry)  # type: ignore[arg-type]
    await horizons.read()
    registry.times_ms["new"] = 45
    assert await horizons.read() == Horizon(45, 50, "new", 0)
