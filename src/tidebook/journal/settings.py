"""What a user may set of journals: `[journal]` in tidebook.toml. Facts of a topic count only when it is made."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tidebook.core.topic import TopicFacts

BarrierKind = Literal["mark", "offset"]
#: At least one: with none, a page would look like the end of a journal.
Some = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class JournalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of new topics, and the bounds of this process."""

    partitions: Some = 4
    segment_size: Some = 1000
    segments: Some = 512
    limit_bytes: Some = 1_000_000
    #: How a read learns where the log ends: a mark pushed to it (linearizable), or its end offset (no write).
    barrier: BarrierKind = "mark"
    page_events: Some = 1000
    snapshot_slots: Some = 3
    #: The head cache, a partition: resolved heads and their bytes, offsets of unreplicated records and their bytes.
    cached_heads_max: Some = 32_768
    cached_head_bytes_max: Some = 64_000_000
    cached_offsets_max: Some = 1_000_000
    cached_bytes_max: Some = 32_000_000
    #: An unreplicated tail up to this size is read once; a longer one is streamed a second time.
    tail_bytes_max: Some = 8_000_000
    #: A partition is tailed for this long after it was last used.
    follow_s: Seconds = 60.0

    def facts(self, topic_id: str, partitions: int) -> TopicFacts:
        """The facts of a topic that is made now."""
        return TopicFacts(
            topic_id=topic_id,
            partitions=partitions,
            segment_size=self.segment_size,
            segments=self.segments,
            limit_bytes=self.limit_bytes,
            admitted=False,
        )
