"""The head of a journal: all that the fold needs to know of its past."""

from __future__ import annotations

from typing import Final

import msgspec

from tidebook.core.errors import Corrupt
from tidebook.core.position import Position

#: How many appends a head remembers, so that a retry is recognized.
RECENT_MAX: Final = 16
#: How many jumps over whole segments a head remembers; past that the narrowest is forgotten, and walked.
JUMPS_MAX: Final = 64
#: How many different tags the events of one life of a journal may carry: a head counts each of them.
JOURNAL_TAGS_MAX: Final = 10_000


class Recent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An append that a retry may repeat, with what came of it."""

    append_id: bytes
    first: int
    last: int
    position: Position


class Jump(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A gap in the numbers, at least one segment wide: nothing lies between `last` and `next`."""

    last: int
    next: int


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a journal stands at `position`. A head that is not live is a grave: no journal, but a gate for replays."""

    live: bool
    #: The number so far; a Delete never lies above it, for one that would creates or keeps it there.
    seq_nr: int
    delete_to: int
    #: The position of the record that created this life of the journal.
    incarnation: Position
    #: The position of the last record that changed it.
    position: Position
    segment_size: int
    #: None: it never expires.
    expire_after_ms: int | None
    #: The log's time of the last append, from which the expiry counts.
    touched_ms: int
    recent: tuple[Recent, ...]
    #: The newest append that `recent` has forgotten.
    evicted: Position | None
    jumps: tuple[Jump, ...]
    #: How many events of this life carry each tag: the next one gets the number behind.
    tag_counts: dict[str, int] = {}

    @property
    def expires_at_ms(self) -> int | None:
        """When the journal may be purged, or None."""
        return self.touched_ms + self.expire_after_ms if self.live and self.expire_after_ms is not None else None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Head).decode


def encode_head(head: Head) -> bytes:
    """A head's bytes, the same for the same head."""
    return _encode(head)


def decode_head(data: bytes) -> Head:
    """Undo `encode_head`."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"a head in the store is damaged: {error}: rebuild the store from the log") from error
