"""The horizon of streams by tag: no event can arrive below it any more.

The pointer of each partition has the log time through which it is replicated, which never decreases. Everything
strictly below the least of these times is complete and in its final order, whatever the clocks do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from tidebook.core.replication_plan import Pointer
from tidebook.store.port import StoreWriter

#: The time of a partition that was never replicated: it holds everything back.
NEVER_MS = -1
#: How often a read is repeated for topics that were registered meanwhile, and how many topics are read at once.
READS_MAX = 3
AT_ONCE_MAX = 64

T = TypeVar("T")


class Horizon(msgspec.Struct, frozen=True):
    """The time below which a set of topics is complete, and the partition that holds it there."""

    time_ms: int
    #: The greatest time that any partition has reached.
    most_ms: int
    topic: str | None = None
    partition: int | None = None


def horizon_of(partitions: Mapping[str, int], pointers: Mapping[str, Mapping[int, Pointer]]) -> Horizon:
    """Return the horizon of topics with these numbers of partitions; pointers must be read before the topics."""
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
    """Reads horizons repeatedly. A topic's number of partitions never changes, so it is read once.

    The exception is a topic that is deleted and created again: then its pointers are missing or have moved backwards.
    """

    def __init__(self, store: StoreWriter) -> None:
        self._store = store
        self._registered: Sequence[str] = ()
        self._partitions: dict[str, int] = {}
        self._pointers: dict[str, Mapping[int, Pointer]] = {}

    async def read(self, topics: Iterable[str] | None = None) -> Horizon:
        """Read the pointers, then the topics: a topic that is registered in between holds the horizon back."""
        wanted = None if topics is None else list(topics)
        known = wanted if wanted is not None else self._registered or await self._store.topics()
        registered, pointers = known, dict[str, Mapping[int, Pointer]]()
        for _ in range(READS_MAX):
            pointers = await gather_by_topic(self._store.pointers, known)
            if wanted is None:
                self._registered = await self._store.topics()
            registered = wanted if wanted is not None else self._registered
            if pointers.keys() >= set(registered):
                break
            known = registered  # usually registered since the last read: its pointers may exist by now
        for topic in set(self._partitions) - set(registered if wanted is None else self._partitions):
            del self._partitions[topic]
        for topic, found in pointers.items():
            if _moved_backwards(self._pointers.get(topic, {}), found):
                self._partitions.pop(topic, None)
        self._pointers |= pointers
        new = [topic for topic in registered if topic not in self._partitions]
        for topic, config in (await gather_by_topic(self._store.topic_config, new)).items():
            if config is not None:
                self._partitions[topic] = config.partitions
        counts = {topic: self._partitions[topic] for topic in registered if topic in self._partitions}
        return horizon_of(counts, pointers)

    def partitions(self, topics: Iterable[str] | None = None) -> dict[str, int]:
        """Return the number of partitions of each topic that the last read found."""
        wanted = self._registered if topics is None else topics
        return {topic: self._partitions[topic] for topic in wanted if topic in self._partitions}


def _moved_backwards(before: Mapping[int, Pointer], now: Mapping[int, Pointer]) -> bool:
    return any(partition not in now or now[partition].position < old.position for partition, old in before.items())


async def gather_by_topic(read: Callable[[str], Awaitable[T]], topics: Sequence[str]) -> dict[str, T]:
    """Return the result of `read` for each topic, awaited concurrently."""
    found: dict[str, T] = {}
    for first in range(0, len(topics), AT_ONCE_MAX):
        chunk = topics[first : first + AT_ONCE_MAX]
        found |= zip(chunk, await asyncio.gather(*map(read, chunk)), strict=True)
    return found


async def read_horizon(store: StoreWriter, topics: Iterable[str] | None = None) -> Horizon:
    """Return the current horizon."""
    return await Horizons(store).read(topics)
