"""Actions: the records of a journal's log. What each does to a journal is defined in `fold` alone.

The layout of a version is exact: an array with more elements than fields is damaged. If an older version skipped a
field that it does not know, processes would interpret one log differently, so a new field requires a new version of the
envelope.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Final

import msgspec

from tidebook.core.bounds import EVENTS_MAX, NUMBER_MAX, OFFSET_MAX, EpochNumber, Identity, Number, Ordinal, TimeMs
from tidebook.core.errors import InvalidInput
from tidebook.core.position import Position

#: The `expire_after` that removes the expiry of a journal.
NEVER: Final = 0

_EventCount = Annotated[int, msgspec.Meta(ge=1, le=EVENTS_MAX)]


def expiry_ms(expire_after: timedelta | int | None) -> int | None:
    """Return the expiry in milliseconds, as in the envelope; raise InvalidInput if it is not valid."""
    if expire_after is None or (type(expire_after) is int and expire_after == NEVER):
        return expire_after
    if not isinstance(expire_after, timedelta):
        raise InvalidInput("expire_after must be a timedelta, or tidebook.NEVER to remove an expiry")
    ms = expire_after // timedelta(milliseconds=1)
    if not 1 <= ms <= NUMBER_MAX:
        raise InvalidInput(f"expire_after must be from 1 to {NUMBER_MAX} milliseconds, not {expire_after}")
    return ms


class Append(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False, forbid_unknown_fields=True):
    """Add events atomically, numbered from `at`, or else after the last number."""

    epoch: EpochNumber
    append_id: Identity
    count: _EventCount
    #: The packed events (`pack_events`), which are opaque to the fold.
    body: bytes
    #: The append is void if this is not the journal's last number.
    expected: Number | None = None
    #: The number of the first event; the append is void if this is not above the journal's last number.
    at: Ordinal | None = None
    #: None leaves the journal's expiry unchanged, NEVER removes it.
    expire_after_ms: Number | None = None
    #: Set if an earlier attempt may have been made: no attempt is below this offset; -1 if the offset is unknown or of
    #: an earlier epoch. The append is void if the journal may have forgotten that attempt.
    floor: Annotated[int, msgspec.Meta(ge=-1, le=OFFSET_MAX)] | None = None
    #: How many of the events carry each tag, so that tags are numbered without decoding the body.
    tagged: tuple[tuple[str, _EventCount], ...] = ()
    #: With `expected`: the incarnation that the sender saw. The append is void in any other incarnation, for example if
    #: the journal was purged and has grown to the same number since.
    incarnation: Position | None = None


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False, forbid_unknown_fields=True):
    """Delete the existing events up to `to`; later events are not affected."""

    epoch: EpochNumber
    to: Ordinal
    #: The incarnation of the journal that the sender saw; on another incarnation the delete has no effect.
    incarnation: Position | None = None


class Purge(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False, forbid_unknown_fields=True):
    """Remove the journal; the next append creates a new incarnation, numbered from 1.

    With `if_position`, this has an effect only if the head is at that position.
    """

    epoch: EpochNumber
    if_position: Position | None = None


class Mark(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False, forbid_unknown_fields=True):
    """Change no journal: a barrier for reads and, with `time_ms`, a tick that advances an idle partition's log time."""

    epoch: EpochNumber
    time_ms: TimeMs | None = None


class Seal(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False, forbid_unknown_fields=True):
    """Reserved: end an epoch of this topic."""

    epoch: EpochNumber


class Damaged(msgspec.Struct, frozen=True, gc=False):
    """A record that is unreadable or over the topic's limit. It has no effect, and the pipeline parks it."""

    reason: str


Action = Append | Delete | Purge | Mark | Seal
