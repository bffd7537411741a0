"""Small histories of a journal: actions made by hand, every history of a length, and random ones for Hypothesis."""

from __future__ import annotations

import msgspec

from tidebook.core.action import Append, Delete, Purge
from tidebook.core.event import Event, encode_event, pack_events
from tidebook.core.position import FIRST_EPOCH, Position


def append(
    count: int = 1,
    *,
    expected: int | None = None,
    at: int | None = None,
    expire_after_ms: int | None = None,
    append_id: bytes = b"",
    floor: int | None = None,
    payload: bytes = b"",
    epoch: int = FIRST_EPOCH,
) -> Append:
    """An append of `count` events whose payloads tell them apart; without an id it wants one from who places it."""
    body = pack_events(encode_event(Event(b"%d:" % i + payload)) for i in range(count))
    return Append(epoch, append_id, count, body, expected, at, expire_after_ms, floor)


def delete(to: int, *, incarnation: Position | None = None, epoch: int = FIRST_EPOCH) -> Delete:
    """A delete up to a number."""
    return Delete(epoch, to, incarnation)


def purge(*, if_position: Position | None = None, epoch: int = FIRST_EPOCH) -> Purge:
    """A purge, with or without a condition."""
    return Purge(epoch, if_position)


def placed_at(action: Append, offset: int) -> Append:
    """The append with an id, and payloads, that say at which offset it stands."""
    return msgspec.structs.replace(
        append(action.count, payload=b"@%d" % offset),
        epoch=action.epoch,
        append_id=action.append_id or offset.to_bytes(16, "big"),
        expected=action.expected,
        at=action.at,
        expire_after_ms=action.expire_after_ms,
        floor=action.floor,
    )
