"""The settings of journals: section `[journal]` of tidebook.toml."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tidebook.core.topic_config import TopicConfig

BarrierKind = Literal["mark", "offset"]
#: At least 1: with a page size of 0, a page would look like the end of the journal.
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class JournalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of new topics, which are frozen when a topic is created, and the limits of this process."""

    partitions: Positive = 4
    segment_size: Positive = 1000
    segments: Positive = 512
    limit_bytes: Positive = 1_000_000
    #: How a read finds the end of the log: by appending a mark (linearizable), or by its end offset (no write).
    barrier: BarrierKind = "mark"
    page_events: Positive = 1000
    snapshot_slots: Positive = 3
    #: The most heads in the head cache of one partition.
    cached_heads_max: Positive = 32_768
    #: The most bytes of heads in the head cache of one partition.
    cached_head_bytes_max: Positive = 64_000_000
    #: The most offsets of unreplicated records in the head cache of one partition, 16 bytes each.
    cached_offsets_max: Positive = 1_000_000
    #: The most bytes of unreplicated records in the head cache of one partition; older ones are read from the log.
    cached_bytes_max: Positive = 32_000_000
    #: An unreplicated tail up to this size is kept in memory by a read; a longer one is read from the log twice.
    tail_bytes_max: Positive = 8_000_000
    #: How long a partition is followed after its last use.
    follow_s: Seconds = 60.0

    def topic_config(self, topic_id: str, partitions: int) -> TopicConfig:
        """Return the configuration of a topic that is created now."""
        return TopicConfig(
            topic_id=topic_id,
            partitions=partitions,
            segment_size=self.segment_size,
            segments=self.segments,
            limit_bytes=self.limit_bytes,
            admitted=False,
        )
