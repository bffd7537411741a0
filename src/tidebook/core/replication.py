"""What a replicator writes for a slice of the log: decided here, purely; carried out by a store.

Each write of a key is acknowledged before the next one of that key is sent, and the pointer comes after all keys.
The order is forced by crashes, zombies and replays; `docs/explanation/replication.md` tells why, rule by rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidebook.core.action import Action, Append, Damaged, Delete, Mark, Purge
from tidebook.core.event import event_tags, unpack_events
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
    """A tagged event as `tag_views` keeps it, with the number it has among its journal's events of that tag.

    It is flat, in the order of the table's columns: millions of them are made from rows, and rows from them.
    """

    tag: str
    time_ms: int
    topic: str
    partition: int
    offset: int
    index: int
    epoch: int
    id: str
    #: The life of the journal that the number counts in.
    life_epoch: int
    life_offset: int
    tag_seq_nr: int
    seq_nr: int
    timestamp_ms: int
    kept: bytes

    @property
    def place(self) -> TagPlace:
        """Where it stands in the stream."""
        return TagPlace(self.tag, self.time_ms, self.topic, self.partition, self.offset, self.index, self.epoch)

    @property
    def incarnation(self) -> Position:
        """The life of the journal that the number counts in."""
        return Position(self.life_epoch, self.life_offset)

    @property
    def position(self) -> Position:
        """Where the log has its record."""
        return Position(self.epoch, self.offset)

    @property
    def event(self) -> EventRow:
        """The event as its journal keeps it."""
        return EventRow(self.seq_nr, self.kept, self.timestamp_ms, self.position, self.index, self.time_ms)


def tag_row(tag: str, key: Key, partition: int, life: Position, tag_seq_nr: int, event: EventRow) -> TagRow:
    """The row of an event in one of its tags."""
    at = event.position
    return TagRow(
        tag, event.time_ms, key.topic, partition, at.offset, event.index, at.epoch, key.id,
        life.epoch, life.offset, tag_seq_nr, event.seq_nr, event.timestamp_ms, event.kept,
    )  # fmt: skip


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
    #: The record's own size, where the store has kept only its first bytes.
    whole_bytes: int | None = None


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
    records: Sequence[Placed],
    facts: TopicFacts,
    *,
    partition: int = 0,
    clear_tags: bool = True,
) -> tuple[Write, ...]:
    """The writes that bring one journal from `head`, as it was read, to the end of `records`, which are in order.

    With `clear_tags=False` deleted and purged events stay in their tags' streams.
    """
    writes: list[Write] = []
    skipped = 0
    cleared_before = False
    if head is not None:
        for placed in records:
            if placed.position > head.position:
                break
            skipped += 1
            cleared_before = cleared_before or isinstance(placed.action, Delete | Purge)
        if skipped:
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
    for placed in records[skipped:] if skipped else records:
        before = now
        now, change = fold(now, placed.action, placed.position, placed.timestamp_ms, facts)
        match change:
            case Appended():
                new = _rows(placed, change)
                rows += new
                if placed.action.tagged:  # type: ignore[union-attr]
                    assert now is not None
                    tags += _tag_rows(key, partition, before, now.incarnation, placed.action.tagged, new)  # type: ignore[union-attr]
                dirty = True
            case Purged():
                assert now is not None
                unwritten = tuple(row.place for row in tags) if clear_tags else ()
                kept_tags = () if clear_tags else tuple(tags)
                if kept_tags:
                    writes.append(PutTags(key, now, kept_tags))
                writes += (PutHead(key, now), ClearJournal(key, now, unwritten, clear_tags))
                rows, tags, dirty, clear, clear_above = [], [], False, False, 0
            case Deleted():
                dirty = clear = True
            case _:
                pass
    if not (dirty or clear):
        return tuple(writes)
    assert now is not None
    gone = now.delete_to if clear_tags else 0
    if dirty:
        kept, kept_tags = tuple(rows), tuple(tags)
        if now.delete_to:
            kept = tuple(row for row in rows if row.seq_nr > now.delete_to)
            kept_tags = tuple(row for row in tags if row.seq_nr > gone)
        if kept:
            writes.append(PutEvents(key, now, kept))
        if kept_tags:
            writes.append(PutTags(key, now, kept_tags))
        writes.append(PutHead(key, now))
    if clear:
        unwritten = tuple(row.place for row in tags if row.seq_nr <= gone)
        writes.append(ClearEvents(key, now, clear_above, unwritten, clear_tags))
    return tuple(writes)


def _tag_rows(
    key: Key,
    partition: int,
    before: Head | None,
    life: Position,
    tagged: Sequence[tuple[str, int]],
    rows: Sequence[EventRow],
) -> list[TagRow]:
    """The tag rows of one record's events."""
    counts = before.tag_counts if before is not None and before.live else {}
    if len(rows) == 1 or all(count == len(rows) for _, count in tagged):
        # Every event carries every tag of the record, as single ones do: the envelope says it all.
        return [
            tag_row(tag, key, partition, life, number, row)
            for tag, _ in tagged
            for number, row in enumerate(rows, counts.get(tag, 0) + 1)
        ]
    made = []
    counts = dict(counts)
    for row in rows:
        for tag in event_tags(row.kept):
            counts[tag] = number = counts.get(tag, 0) + 1
            made.append(tag_row(tag, key, partition, life, number, row))
    return made


def _rows(placed: Placed, change: Appended) -> list[EventRow]:
    assert isinstance(placed.action, Append)
    first, timestamp_ms, position, time_ms = change.first, placed.timestamp_ms, placed.position, placed.time_ms
    kept = unpack_events(placed.action.body)
    if len(kept) == 1:
        return [EventRow(first, kept[0], timestamp_ms, position, 0, time_ms)]
    return [EventRow(first + i, each, timestamp_ms, position, i, time_ms) for i, each in enumerate(kept)]


def advance_time(time_ms: int, timestamp_ms: int, action: Action | Damaged) -> int:
    """The log's time at a record, from the time at the one before: never back, ticks and marks included."""
    if timestamp_ms > time_ms:
        time_ms = timestamp_ms
    if isinstance(action, Mark) and action.time_ms is not None and action.time_ms > time_ms:
        return action.time_ms
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
