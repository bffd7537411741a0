"""Actions: what the log holds. What each one does to a journal is told in `fold`, and nowhere else."""

from __future__ import annotations

from typing import Final

import msgspec

from tidebook.core.position import Position

#: As `expire_after`: the journal no longer expires.
NEVER: Final = 0


class Append(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Events to be added atomically. Numbered next, or at `expected + 1` if the journal stands there, or from `at`."""

    epoch: int
    append_id: bytes
    count: int
    #: The events, packed; the fold never looks inside.
    body: bytes
    expected: int | None = None
    at: int | None = None
    #: None keeps the journal's expiry, NEVER removes it.
    expire_after_ms: int | None = None
    #: Set on a retry: the partition's end before the first attempt, or -1 if that was in an earlier epoch.
    floor: int | None = None
    #: How many of the events carry each tag, so that tags are numbered without looking into the body.
    tagged: tuple[tuple[str, int], ...] = ()


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Remove the events up to `to`, never future ones."""

    epoch: int
    to: int
    #: The life of the journal that the sender saw; in another one the delete does nothing.
    incarnation: Position | None = None


class Purge(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Remove the journal; the next append makes a new one from 1. With `if_position` only if its head stands there."""

    epoch: int
    if_position: Position | None = None


class Mark(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Changes nothing: a place in the log to read up to, and a tick that moves idle partitions on."""

    epoch: int
    time_ms: int | None = None


class Seal(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Reserved: ends an epoch on this topic."""

    epoch: int


class Damaged(msgspec.Struct, frozen=True, gc=False):
    """A record that nobody can read, or over the topic's limit: void for everybody, and kept aside by the pipeline."""

    reason: str


Action = Append | Delete | Purge | Mark | Seal
