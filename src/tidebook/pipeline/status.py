"""How far each partition is replicated."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from tidebook.core.errors import LogLost, Unavailable
from tidebook.core.replication import Pointer
from tidebook.core.topic import TopicFacts
from tidebook.wiring.book import Book


class PartitionStatus(msgspec.Struct, frozen=True):
    """One log partition, as it stands."""

    topic: str
    partition: int
    epoch: int
    #: The log's first offset, and the one that its next record gets.
    start: int
    end: int
    #: The first offset that is not replicated yet.
    replicated: int
    #: Records that the store does not have yet, and how long the first of them has waited.
    lag: int
    lag_s: float


async def topic_facts(book: Book, topics: tuple[str, ...] = ()) -> dict[str, TopicFacts]:
    """The facts of these topics, or of all; a topic that was never written has none."""
    found = {topic: await book.store.facts(topic) for topic in topics or await book.topics()}
    return {topic: facts for topic, facts in found.items() if facts is not None}


async def partition_statuses(book: Book, facts: Mapping[str, TopicFacts]) -> list[PartitionStatus]:
    """All partitions of these topics."""
    asked = [
        _status(book, topic, number, each.epoch) for topic, each in facts.items() for number in range(each.partitions)
    ]
    return list(await asyncio.gather(*asked))


async def _status(book: Book, topic: str, partition: int, epoch: int) -> PartitionStatus:
    # The pointer first: what is replicated meanwhile then only makes the lag look larger, never negative.
    pointer = await book.store.pointer(topic, partition)
    start, end = await asyncio.gather(book.log.start(topic, partition), book.log.end(topic, partition))
    replicated = replicated_to(pointer, epoch)
    lag = max(0, end - max(replicated, start))
    behind_ms = 0
    if lag:
        since_ms = await _waits_since_ms(book, topic, partition, max(replicated, start), end, pointer)
        behind_ms = max(0, book.clock.now_ms() - since_ms)
    return PartitionStatus(topic, partition, epoch, start, end, replicated, lag, behind_ms / 1000)


async def _waits_since_ms(book: Book, topic: str, partition: int, start: int, end: int, pointer: Pointer | None) -> int:
    """When the log took the first record that waits; the pointer's time where the log cannot tell just now."""
    try:
        page = await book.log.read(topic, partition, start=start, stop=end, limit=1)
    except (LogLost, Unavailable):
        page = None
    if page is not None and page.records:
        return page.records[0].timestamp_ms
    return book.clock.now_ms() if pointer is None else pointer.time_ms


def replicated_to(pointer: Pointer | None, epoch: int) -> int:
    """The first offset of an epoch that is not replicated yet."""
    return 0 if pointer is None or pointer.position.epoch < epoch else pointer.position.offset + 1
