"""Find the offsets where replication starts, and handle records that the log lost before they were replicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidebook.core.errors import LogLost
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.topic import begin_epoch, check_topic
from tidebook.pipeline.status import PartitionStatus, partition_statuses, topic_configs
from tidebook.wiring.book import Book


async def find_starts(book: Book, configs: Mapping[str, TopicConfig]) -> dict[str, dict[str, int]]:
    """Return the first unreplicated offset of every partition; raise `LogLost` if the log begins after one."""
    for topic, each in configs.items():
        await check_topic(book.log, book.store, topic, each)
        await begin_epoch(book.store, topic, each)
    starts: dict[str, dict[str, int]] = {topic: {} for topic in configs}
    for status in await partition_statuses(book, configs):
        if status.start > status.replicated:
            raise LogLost(
                topic=status.topic,
                partition=status.partition,
                first=status.replicated,
                last=status.start - 1,
                remedy="restore the log from a copy, or go on without them: tidebook pipeline replicate --accept-loss",
            )
        starts[status.topic][str(status.partition)] = status.replicated
    return starts


class LostOffsets(msgspec.Struct, frozen=True):
    """Offsets that the log lost before they were replicated."""

    topic: str
    partition: int
    first: int
    last: int


async def accept_losses(book: Book, topics: Sequence[str] = ()) -> list[LostOffsets]:
    """Move the pointers to the log's start, and return the offsets that are skipped.

    Later appends of the affected journals may get other sequence numbers than their writers were returned, or be void.
    """
    configs = await topic_configs(book, tuple(topics))
    lost = []
    for status in await partition_statuses(book, configs):
        if status.start > status.replicated:
            await _move(book, status)
            lost.append(LostOffsets(status.topic, status.partition, status.replicated, status.start - 1))
    return lost


async def _move(book: Book, status: PartitionStatus) -> None:
    began = await book.store.pointer(status.topic, status.partition)
    time_ms = 0 if began is None else began.time_ms
    pointer = Pointer(Position(status.epoch, status.start - 1), time_ms)
    await book.store.apply(SliceWrites(status.topic, status.partition, began, pointer, ()))
