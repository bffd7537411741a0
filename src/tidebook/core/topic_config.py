"""The configuration of a topic. It is stored when the topic is registered, and changed only by compare-and-set."""

from __future__ import annotations

import msgspec

from tidebook.core.bounds import Counter, EpochNumber, Ordinal
from tidebook.core.position import FIRST_EPOCH


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a topic that all its writers, replicators and readers must agree on."""

    #: The log's id of this incarnation of the topic.
    topic_id: str
    partitions: Ordinal
    epoch: EpochNumber = FIRST_EPOCH
    #: How many events share a partition of the store's `journal` table.
    segment_size: Ordinal = 1000
    #: How many partitions the store's `metajournal` table has for the topic.
    segments: Ordinal = 512
    limit_bytes: Ordinal = 1_000_000
    #: False from the topic's registration until its log time was raised to the greatest log time of the book.
    admitted: bool = True
    #: The start of the current epoch by partition: offset and time of its mark. Empty in the first epoch.
    began: tuple[tuple[Counter, Counter], ...] = ()
