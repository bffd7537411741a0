"""The head of a journal: the state that the fold needs from all earlier actions."""

from __future__ import annotations

from typing import Final

import msgspec

from tidebook.core.bounds import DECODE_ERRORS
from tidebook.core.errors import Corrupt
from tidebook.core.position import Position

#: How many appends a head remembers in order to recognize retries.
RECENT_MAX: Final = 16
#: How long a grave has effect, by record timestamps; after that, its remembered appends are ignored. Equal to
#: Cassandra's default gc_grace_seconds: no process that could bring back purged data survives that long.
GRAVE_RETENTION_MS: Final = 10 * 86_400_000
#: How many different tags the events of one incarnation of a journal may carry: the head counts each of them.
JOURNAL_TAGS_MAX: Final = 10_000


class RecentAppend(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A recent append that a retry may repeat, with its result."""

    append_id: bytes
    first: int
    last: int
    position: Position


class Jump(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A gap of at least one segment: no event has a number between `last` and `next`, both exclusive."""

    last: int
    next: int


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of a journal after the record at `position`.

    A head that is not live is a grave: the journal is purged, and a replay of older records must not revive it.
    """

    live: bool
    #: The last number, never below `delete_to`: a delete in a live journal is capped at it, any other delete sets both.
    seq_nr: int
    delete_to: int
    #: The position of the record that created this incarnation of the journal.
    incarnation: Position
    #: The position of the last record that changed the journal.
    position: Position
    segment_size: int
    #: None if the journal never expires.
    expire_after_ms: int | None
    #: The timestamp of the last append, from which the expiry counts; in a grave, the timestamp of the purge.
    touched_ms: int
    recent: tuple[RecentAppend, ...]
    #: The position of the newest append that was evicted from `recent`.
    evicted: Position | None
    #: Gaps within the last run of segments. Only an earlier version added them, up to 64; the next append that skips a
    #: segment removes them.
    jumps: tuple[Jump, ...]
    #: How many events of this incarnation carry each tag; the next event of a tag is numbered one higher.
    tag_counts: dict[str, int] = {}
    #: The first segment of the last contiguous run, which ends with the segment of `seq_nr`. Earlier segments that hold
    #: events are listed in the store (`PutSegments`), so that the head stays small even if numbers are skipped.
    run_start: int = 0

    @property
    def expires_at_ms(self) -> int | None:
        """The time from which the journal may be purged, or None if it never expires."""
        return self.touched_ms + self.expire_after_ms if self.live and self.expire_after_ms is not None else None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Head).decode


def encode_head(head: Head) -> bytes:
    """Encode a head; equal heads have equal bytes."""
    return _encode(head)


def decode_head(data: bytes) -> Head:
    """Undo `encode_head`; raise Corrupt for damaged bytes."""
    try:
        return _decode(data)
    except DECODE_ERRORS as error:
        raise Corrupt(f"a head in the store is damaged: {error}: rebuild the store from the log") from error
