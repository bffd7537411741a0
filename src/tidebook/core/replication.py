"""What a replicator writes for a slice of the log: decided here, purely; carried out by a store.

Each write of a key is acknowledged before the next one of that key is sent, and the pointer comes after all keys.
The order is forced by crashes, zombies and replays; `docs/explanation/replication.md` tells why, rule by rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from tidebook.core.action import Action, Append, Damaged, Delete, Mark, Purge
from tidebook.core.event import decode_event, unpack_events
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
    #: The log's time here: never back within the partition, marks and ticks included. Tags are ordered by it.
    time_ms: int = 0


class EventRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event as the store keeps it. Stores may keep its msgpack: a new field goes last, and has a default."""

    seq_nr: int
    #: The event's bytes, which the store does not look into.
    kept: bytes
    timestamp_ms: int
    position: Position
    #: Which event of its record it is, from 0.
    index: int
    time_ms: int = 0


class TagPlace(msgspec.Struct, frozen=True, order=True, gc=False):
    """Where a tagged event stands in its tag's stream: by the log's time, then by where the log has it."""

    tag: str
    time_ms: int
    topic: str
    partition: int
    offset: int
    index: int
    epoch: int


class TagRow(msgspec.Struct, frozen=True, gc=False):
    """A tagged event as `tag_views` keeps it, with the number it has among its journal's events of that tag."""

    place: TagPlace
    id: str
    #: The life of the journal that the number counts in.
    incarnation: Position
    tag_seq_nr: int
    event: EventRow


class PutTags(msgspec.Struct, frozen=True, gc=False):
    """Write these tag rows, each at its own position's stamp, then how far each tag of the journal has come."""

    key: Key
    head: Head
    rows: tuple[TagRow, ...]


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
    #: Tag rows of events that this slice itself would have written: another replicator may have, or may yet.
    unwritten: tuple[TagPlace, ...] = ()
    clear_tags: bool = True


class ClearJournal(msgspec.Struct, frozen=True, gc=False):
    """Clear all that a grave's life has left: tag rows, events of every segment up to its number, snapshots."""

    key: Key
    head: Head
    unwritten: tuple[TagPlace, ...] = ()
    clear_tags: bool = True


Write = PutEvents | PutTags | PutHead | ClearEvents | ClearJournal


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


def plan_key(
    key: Key,
    head: Head | None,
    records: Iterable[Placed],
    facts: TopicFacts,
    *,
    partition: int = 0,
    clear_tags: bool = True,
) -> tuple[Write, ...]:
    """The writes that bring one journal from `head`, as it was read, to the end of `records`.

    With `clear_tags=False` deleted and purged events stay in their tags' streams.
    """
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
            writes.append(ClearJournal(key, head, (), clear_tags))
    clear = cleared_before and head is not None and head.live
    clear_above = head.delete_to if head is not None and head.live and not cleared_before else 0

    now = head
    rows: list[EventRow] = []
    tags: list[TagRow] = []
    dirty = False
    for placed in work:
        before = now
        now, change = fold(now, placed.action, placed.position, placed.timestamp_ms, facts)
        match change:
            case Purged():
                assert now is not None
                unwritten = tuple(row.place for row in tags) if clear_tags else ()
                kept_tags = () if clear_tags else tuple(tags)
                if kept_tags:
                    writes.append(PutTags(key, now, kept_tags))
                writes += (PutHead(key, now), ClearJournal(key, now, unwritten, clear_tags))
                rows, tags, dirty, clear, clear_above = [], [], False, False, 0
            case Appended():
                new = _rows(placed, change)
                rows += new
                if placed.action.tagged:  # type: ignore[union-attr]
                    assert now is not None
                    tags += _tag_rows(key, partition, before, now.incarnation, new)
                dirty = True
            case Deleted():
                dirty = clear = True
            case _:
                pass
    if not (dirty or clear):
        return tuple(writes)
    assert now is not None
    gone = now.delete_to if clear_tags else 0
    if dirty:
        kept = tuple(row for row in rows if row.seq_nr > now.delete_to)
        kept_tags = tuple(row for row in tags if row.event.seq_nr > gone)
        if kept:
            writes.append(PutEvents(key, now, kept))
        if kept_tags:
            writes.append(PutTags(key, now, kept_tags))
        writes.append(PutHead(key, now))
    if clear:
        unwritten = tuple(row.place for row in tags if row.event.seq_nr <= gone)
        writes.append(ClearEvents(key, now, clear_above, unwritten, clear_tags))
    return tuple(writes)


def _tag_rows(
    key: Key, partition: int, before: Head | None, life: Position, rows: Iterable[EventRow]
) -> Iterator[TagRow]:
    counts = dict(before.tag_counts) if before is not None and before.live else {}
    for row in rows:
        for tag in decode_event(row.kept).tags:
            counts[tag] = counts.get(tag, 0) + 1
            at = row.position
            place = TagPlace(tag, row.time_ms, key.topic, partition, at.offset, row.index, at.epoch)
            yield TagRow(place, key.id, life, counts[tag], row)


def _rows(placed: Placed, change: Appended) -> list[EventRow]:
    assert isinstance(placed.action, Append)
    return [
        EventRow(change.first + i, kept, placed.timestamp_ms, placed.position, i, placed.time_ms)
        for i, kept in enumerate(unpack_events(placed.action.body))
    ]


def advance_time(time_ms: int, timestamp_ms: int, action: Action | Damaged) -> int:
    """The log's time at a record, from the time at the one before: never back, ticks and marks included."""
    tick = action.time_ms if isinstance(action, Mark) and action.time_ms is not None else 0
    return max(time_ms, timestamp_ms, tick)


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
