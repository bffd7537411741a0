"""The horizon: below it nothing can arrive any more.

Every partition's pointer says through which time of the log it is replicated, and that time never goes back. What is
strictly below the least of them is complete, in its final order, whatever the clocks do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from tidebook.core.replication import Pointer
from tidebook.store.port import StoreWriter

#: A partition that was never replicated holds everything back.
NEVER_MS = -1
#: How often topics that are registered meanwhile are looked at, and of how many topics at once.
LOOKS_MAX = 3
AT_ONCE_MAX = 64

T = TypeVar("T")


class Horizon(msgspec.Struct, frozen=True):
    """Through which time a set of topics is complete, and which partition holds it there."""

    time_ms: int
    #: The greatest time that any partition has reached.
    most_ms: int
    topic: str | None = None
    partition: int | None = None


def horizon_of(partitions: Mapping[str, int], pointers: Mapping[str, Mapping[int, Pointer]]) -> Horizon:
    """The horizon of topics with so many partitions, from the pointers that were read before their registry was."""
    least: tuple[int, str, int] | None = None
    most_ms = NEVER_MS
    for topic, count in partitions.items():
        for partition in range(count):
            pointer = pointers.get(topic, {}).get(partition)
            time_ms = NEVER_MS if pointer is None else pointer.time_ms
            most_ms = max(most_ms, time_ms)
            if least is None or time_ms < least[0]:
                least = (time_ms, topic, partition)
    if least is None:
        return Horizon(NEVER_MS, most_ms)
    return Horizon(least[0], most_ms, least[1], least[2])


class Horizons:
    """Reads horizons again and again. How many partitions a topic has never changes, so it is asked for once."""

    def __init__(self, store: StoreWriter) -> None:
        self._store = store
        self._registered: Sequence[str] = ()
        self._partitions: dict[str, int] = {}

    async def read(self, topics: Iterable[str] | None = None) -> Horizon:
        """Read the pointers, then the registry: a topic that is registered in between holds the horizon back."""
        wanted = None if topics is None else list(topics)
        known = wanted if wanted is not None else self._registered or await self._store.topics()
        registered, pointers = known, dict[str, Mapping[int, Pointer]]()
        for _ in range(LOOKS_MAX):
            pointers = await asked_of_each(self._store.pointers, known)
            if wanted is None:
                self._registered = await self._store.topics()
            registered = wanted if wanted is not None else self._registered
            if pointers.keys() >= set(registered):
                break
            known = registered  # since the last time, as a rule: its pointers may be there by now
        new = [topic for topic in registered if topic not in self._partitions]
        for topic, facts in (await asked_of_each(self._store.facts, new)).items():
            if facts is not None:
                self._partitions[topic] = facts.partitions
        counts = {topic: self._partitions[topic] for topic in registered if topic in self._partitions}
        return horizon_of(counts, pointers)


async def asked_of_each(ask: Callable[[str], Awaitable[T]], topics: Sequence[str]) -> dict[str, T]:
    """What a store tells of many topics, asked for side by side."""
    found: dict[str, T] = {}
    for first in range(0, len(topics), AT_ONCE_MAX):
        some = topics[first : first + AT_ONCE_MAX]
        found |= zip(some, await asyncio.gather(*map(ask, some)), strict=True)
    return found


async def read_horizon(store: StoreWriter, topics: Iterable[str] | None = None) -> Horizon:
    """The horizon now, read once."""
    return await Horizons(store).read(topics)
