"""An event as a stream by tag delivers it."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any
from uuid import UUID

import msgspec

from tidebook.core.event import read_event
from tidebook.core.replication import TagPlace, TagRow
from tidebook.tags.offset import encode_offset

#: 100 ns steps from the Gregorian reform, where TimeUUIDs begin, to 1970.
_GREGORIAN_TICKS = 0x01B2_1DD2_1381_4000


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
    place: TagPlace

    @property
    def tag_offset(self) -> str:
        """Where to resume behind it: an opaque text."""
        return encode_offset(self.place)

    @property
    def timestamp(self) -> datetime:
        """When the log took it."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)

    @property
    def time_uuid(self) -> UUID:
        """A TimeUUID (version 1) derived from where the event stands: the same for everybody, one for each event.

        Its time is that of the stream in steps of 100 ns; the stream's own order is `tag_offset`'s.
        """
        at = self.place
        ticks = at.time_ms * 10_000 + at.index % 10_000 + _GREGORIAN_TICKS
        where = f"{at.topic}\0{at.partition}\0{at.offset}\0{at.index}\0{at.epoch}".encode()
        tie = int.from_bytes(blake2b(where, digest_size=8).digest())
        node = tie & 0xFFFF_FFFF_FFFF | 0x0100_0000_0000  # the multicast bit: no machine has it
        fields = (ticks & 0xFFFF_FFFF, ticks >> 32 & 0xFFFF, ticks >> 48 & 0x0FFF, tie >> 56 & 0x3F, tie >> 48 & 0xFF)
        return UUID(fields=(*fields, node), version=1)


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
        place,
    )
