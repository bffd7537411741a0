"""The horizon: below it nothing can arrive any more.

Every partition's pointer says through which time of the log it is replicated, and that time never goes back. What is
strictly below the least of them is complete, in its final order, whatever the clocks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tidebook.core.replication import Pointer
from tidebook.store.port import StoreWriter

#: A partition that was never replicated holds everything back.
NEVER_MS = -1


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


async def read_horizon(store: StoreWriter, topics: Iterable[str] | None = None) -> Horizon:
    """Read the pointers, then the registry: a topic that is registered in between holds the horizon back."""
    wanted = None if topics is None else list(topics)
    known = wanted if wanted is not None else await store.topics()
    pointers = {topic: await store.pointers(topic) for topic in known}
    registered = wanted if wanted is not None else await store.topics()
    partitions = {}
    for topic in registered:
        facts = await store.facts(topic)
        if facts is not None:
            partitions[topic] = facts.partitions
    return horizon_of(partitions, pointers)
