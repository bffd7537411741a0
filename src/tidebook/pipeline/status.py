"""How far each partition is replicated."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

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
    #: Records that the store does not have yet, and how long the first of them waits at most.
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
    behind_ms = book.clock.now_ms() - pointer.time_ms if lag and pointer is not None else 0
    return PartitionStatus(topic, partition, epoch, start, end, replicated, lag, max(0, behind_ms) / 1000)


def replicated_to(pointer: Pointer | None, epoch: int) -> int:
    """The first offset of an epoch that is not replicated yet."""
    return 0 if pointer is None or pointer.position.epoch < epoch else pointer.position.offset + 1
