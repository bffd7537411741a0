"""Replication status of log partitions: offsets and lag."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from tidebook.core.errors import LogLost, Unavailable
from tidebook.core.replication_plan import Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.replication.slice import first_unreplicated_offset
from tidebook.wiring.book import Book


class PartitionStatus(msgspec.Struct, frozen=True):
    """The replication status of one log partition."""

    topic: str
    partition: int
    epoch: int
    #: The log's first offset, and the offset of its next record.
    start: int
    end: int
    #: The first unreplicated offset.
    replicated: int
    #: The number of unreplicated records, and the age of the first.
    lag: int
    lag_s: float


async def topic_configs(book: Book, topics: tuple[str, ...] = ()) -> dict[str, TopicConfig]:
    """Return the configurations of these topics, or of all; topics that were never written are left out."""
    found = {topic: await book.store.topic_config(topic) for topic in topics or await book.topics()}
    return {topic: config for topic, config in found.items() if config is not None}


async def partition_statuses(book: Book, configs: Mapping[str, TopicConfig]) -> list[PartitionStatus]:
    """Return the status of all partitions of these topics; raise `Fenced` if a configuration is outdated."""
    reads = [_status(book, topic, number, each) for topic, each in configs.items() for number in range(each.partitions)]
    return list(await asyncio.gather(*reads))


async def _status(book: Book, topic: str, partition: int, config: TopicConfig) -> PartitionStatus:
    # The pointer is read first, so that concurrent replication makes the lag too large and never negative.
    pointer = await book.store.pointer(topic, partition)
    start, end = await asyncio.gather(book.log.start(topic, partition), book.log.end(topic, partition))
    replicated = first_unreplicated_offset(pointer, topic, partition, config)
    lag = max(0, end - max(replicated, start))
    age_ms = 0
    if lag:
        since_ms = await _oldest_timestamp_ms(book, topic, partition, max(replicated, start), end, pointer)
        age_ms = max(0, book.clock.now_ms() - since_ms)
    return PartitionStatus(topic, partition, config.epoch, start, end, replicated, lag, age_ms / 1000)


async def _oldest_timestamp_ms(
    book: Book, topic: str, partition: int, start: int, end: int, pointer: Pointer | None
) -> int:
    """Return the timestamp of the first unreplicated record, or the pointer's time if the log cannot be read."""
    try:
        page = await book.log.read(topic, partition, start=start, stop=end, limit=1)
    except (LogLost, Unavailable):
        page = None
    if page is not None and page.records:
        return page.records[0].timestamp_ms
    return book.clock.now_ms() if pointer is None else pointer.time_ms
