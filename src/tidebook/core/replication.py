"""What a replicator writes for a slice of the log: decided here, purely; carried out by a store.

Each write of a key is acknowledged before the next one of that key is sent, and the pointer comes after all keys.
The order is forced by crashes, zombies and replays; `docs/explanation/replication.md` tells why, rule by rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tidebook.core.action import Action, Append, Damaged, Delete, Mark, Purge
from tidebook.core.event import unpack_events
from tidebook.core.fold import Appended, Deleted, Purged, fold
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.topic import TopicFacts


class Placed(msgspec.Struct, frozen=True, gc=False):
    """An action where the log has it."""

    position: Position
    timestamp_ms: int
    action: Action | Damaged


class EventRow(msgspec.Struct, frozen=True, gc=False):
    """An event as the store keeps it."""

    seq_nr: int
    #: The event's bytes, which the store does not look into.
    kept: bytes
    timestamp_ms: int
    position: Position
    #: Which event of its record it is, from 0.
    index: int


class PutEvents(msgspec.Struct, frozen=True, gc=False):
    """Write these rows, each at its own position's stamp."""

    key: Key
    head: Head
    rows: tuple[EventRow, ...]


class PutHead(msgspec.Struct, frozen=True, gc=False):
    """Write the whole head, absent values included, at its position's stamp. A grave is a head that is not live."""

    key: Key
    head: Head


class ClearEvents(msgspec.Struct, frozen=True, gc=False):
    """Clear the events above `above` up to the head's delete_to, tag rows before events, at its tombstone stamp."""

    key: Key
    head: Head
    above: int


class ClearJournal(msgspec.Struct, frozen=True, gc=False):
    """Clear all that a grave's life has left: tag rows, events of every segment up to its number, snapshots."""

    key: Key
    head: Head


Write = PutEvents | PutHead | ClearEvents | ClearJournal


class Pointer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition is replicated through this position, and through this time of the log."""

    position: Position
    time_ms: int


class Parked(msgspec.Struct, frozen=True, gc=False):
    """A record that is void because nobody can read it, kept aside."""

    topic: str
    partition: int
    position: Position
    timestamp_ms: int
    id: str | None
    reason: str
    value: bytes


class SliceWrites(msgspec.Struct, frozen=True, gc=False):
    """All that one slice of a partition writes: keys in any order, the pointer last."""

    topic: str
    partition: int
    #: The pointer that was read before the heads; the slice begins at or below the position after it.
    began: Pointer | None
    pointer: Pointer
    keys: tuple[tuple[Write, ...], ...]
    parked: tuple[Parked, ...] = ()


def plan_key(key: Key, head: Head | None, records: Iterable[Placed], facts: TopicFacts) -> tuple[Write, ...]:
    """The writes that bring one journal from `head`, as it was read, to the end of `records`."""
    writes: list[Write] = []
    work: list[Placed] = []
    skipped = cleared_before = False
    for placed in records:
        if head is not None and placed.position <= head.position:
            skipped = True
            cleared_before = cleared_before or isinstance(placed.action, Delete | Purge)
        else:
            work.append(placed)

    if skipped and head is not None:
        # Whoever wrote this head may have died before the rest: do that again, under the same stamps.
        writes.append(PutHead(key, head))
        if cleared_before and not head.live:
            writes.append(ClearJournal(key, head))
    clear = cleared_before and head is not None and head.live
    clear_above = head.delete_to if head is not None and head.live and not cleared_before else 0

    now = head
    rows: list[EventRow] = []
    dirty = False
    for placed in work:
        now, change = fold(now, placed.action, placed.position, placed.timestamp_ms, facts)
        match change:
            case Purged():
                assert now is not None
                writes += (PutHead(key, now), ClearJournal(key, now))
                rows, dirty, clear, clear_above = [], False, False, 0
            case Appended():
                rows += _rows(placed, change)
                dirty = True
            case Deleted():
                dirty = clear = True
            case _:
                pass
    if dirty:
        assert now is not None
        kept = tuple(row for row in rows if row.seq_nr > now.delete_to)
        if kept:
            writes.append(PutEvents(key, now, kept))
        writes.append(PutHead(key, now))
    if clear:
        assert now is not None
        writes.append(ClearEvents(key, now, clear_above))
    return tuple(writes)


def _rows(placed: Placed, change: Appended) -> list[EventRow]:
    assert isinstance(placed.action, Append)
    return [
        EventRow(change.first + i, kept, placed.timestamp_ms, placed.position, i)
        for i, kept in enumerate(unpack_events(placed.action.body))
    ]


def advance_time(time_ms: int, placed: Sequence[Placed]) -> int:
    """The log's time through these records: never back, ticks and marks included."""
    for each in placed:
        tick = each.action.time_ms if isinstance(each.action, Mark) and each.action.time_ms is not None else 0
        time_ms = max(time_ms, each.timestamp_ms, tick)
    return time_ms


def segments_between(head: Head, above: int, to: int) -> list[range]:
    """The `journal` segments that may hold numbers above `above` and up to `to`, without those a jump passed over."""
    if to <= above:
        return []
    size = head.segment_size
    first, last = above // size, (to - 1) // size
    ranges = []
    for jump in head.jumps:
        skip_from, skip_to = (jump.last - 1) // size + 1, (jump.next - 1) // size
        if skip_to <= first or skip_from > last:
            continue
        if skip_from > first:
            ranges.append(range(first, skip_from))
        first = max(first, skip_to)
    if first <= last:
        ranges.append(range(first, last + 1))
    return ranges
