"""Where replication begins, and what to do where the log no longer reaches back to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidebook.core.errors import LogLost
from tidebook.core.position import Position
from tidebook.core.replication import Pointer, SliceWrites
from tidebook.core.topic import TopicFacts
from tidebook.journal.topic import begin_epoch, check_topic
from tidebook.pipeline.status import PartitionStatus, partition_statuses, topic_facts
from tidebook.wiring.book import Book


async def find_starts(book: Book, facts: Mapping[str, TopicFacts]) -> dict[str, dict[str, int]]:
    """The next offset of every partition by the store's pointers, checked against the log."""
    for topic, each in facts.items():
        await check_topic(book.log, book.store, topic, each)
        await begin_epoch(book.store, topic, each)
    starts: dict[str, dict[str, int]] = {topic: {} for topic in facts}
    for status in await partition_statuses(book, facts):
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


class Loss(msgspec.Struct, frozen=True):
    """Offsets that the log has lost before they were replicated."""

    topic: str
    partition: int
    first: int
    last: int


async def accept_losses(book: Book, topics: Sequence[str] = ()) -> list[Loss]:
    """Move the pointers to where the log begins. What lay between is gone; journals go on without it.

    Appends that were numbered by what is lost get other numbers than their writers were told, or are void.
    """
    facts = await topic_facts(book, tuple(topics))
    lost = []
    for status in await partition_statuses(book, facts):
        if status.start > status.replicated:
            await _move(book, status)
            lost.append(Loss(status.topic, status.partition, status.replicated, status.start - 1))
    return lost


async def _move(book: Book, status: PartitionStatus) -> None:
    began = await book.store.pointer(status.topic, status.partition)
    time_ms = 0 if began is None else began.time_ms
    pointer = Pointer(Position(status.epoch, status.start - 1), time_ms)
    await book.store.apply(SliceWrites(status.topic, status.partition, began, pointer, ()))
