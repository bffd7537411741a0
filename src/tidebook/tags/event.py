"""An event as a stream by tag delivers it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from tidebook.core.event import read_event
from tidebook.core.replication import TagRow
from tidebook.tags.offset import encode_offset


class TaggedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event, the journal it is from, its number in the tag, and where to resume behind it."""

    topic: str
    id: str
    tag: str
    seq_nr: int
    tag_seq_nr: int
    payload: Any
    tags: frozenset[str]
    metadata: dict[str, Any] | None
    timestamp_ms: int
    partition: int
    offset: int
    tag_offset: str

    @property
    def timestamp(self) -> datetime:
        """When the log took it."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


def tagged_event(row: TagRow) -> TaggedEvent:
    """Decode a row for a reader."""
    place, kept = row.place, row.event
    event = read_event(kept.kept, kept.seq_nr, kept.timestamp_ms, place.partition, place.offset)
    return TaggedEvent(
        place.topic,
        row.id,
        place.tag,
        event.seq_nr,
        row.tag_seq_nr,
        event.payload,
        event.tags,
        event.metadata,
        event.timestamp_ms,
        event.partition,
        event.offset,
        encode_offset(place),
    )
