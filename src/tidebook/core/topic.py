"""The facts of a topic: frozen when it is made, changed only by compare-and-set, the same for every process."""

from __future__ import annotations

import msgspec

from tidebook.core.position import FIRST_EPOCH


class TopicFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same for all who write, replicate or read a topic."""

    #: The log's own identity of this life of the topic.
    topic_id: str
    partitions: int
    epoch: int = FIRST_EPOCH
    #: How many events share a partition of the store's `journal` table.
    segment_size: int = 1000
    #: How many partitions the store's `metajournal` table has for the topic.
    segments: int = 512
    limit_bytes: int = 1_000_000
    #: False from the topic's registration until its log's time was raised to the greatest one of the book.
    admitted: bool = True
    #: Where the present epoch begins, by partition: offset and time of its mark. Empty in the first epoch.
    began: tuple[tuple[int, int], ...] = ()
