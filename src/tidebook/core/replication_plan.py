"""Plan the store writes that replicate a slice of the log. Planning is pure; a store adapter applies the plan.

The writes of one key are applied in order, each acknowledged before the next is sent; the pointer is written after all
keys. Crashes, zombies and replays force this order: `docs/explanation/replication.md` explains it rule by rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never

import msgspec

from tidebook.core.action import Action, Append, Damaged, Delete, Mark, Purge
from tidebook.core.bounds import TICK_AHEAD_MS_MAX
from tidebook.core.errors import Fenced
from tidebook.core.event import event_tags, unpack_events
from tidebook.core.fold import (
    AppendApplied,
    AppendRepeated,
    DeleteApplied,
    PurgeApplied,
    Rejected,
    RetryTooLate,
    Stale,
    TooManyTags,
    Unchanged,
    fold,
)
from tidebook.core.head import GRAVE_RETENTION_MS, Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.topic_config import TopicConfig


class PositionedAction(msgspec.Struct, frozen=True, gc=False):
    """An action with its position and times in the log."""

    position: Position
    timestamp_ms: int
    action: Action | Damaged
    #: The log time, which never decreases within a partition (`advance_time`). Tag streams are ordered by it.
    time_ms: int = 0


class EventRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event as a row of the store. Stores may persist its msgpack: add new fields last, with a default."""

    seq_nr: int
    #: The encoded event, which is opaque to the store.
    encoded: bytes
    timestamp_ms: int
    position: Position
    #: The index of the event within its record, from 0.
    index: int
    time_ms: int = 0


class TagPosition(msgspec.Struct, frozen=True, order=True, gc=False):
    """The position of a tagged event in its tag's stream: ordered by log time, then by position in the log."""

    tag: str
    time_ms: int
    topic: str
    partition: int
    offset: int
    index: int
    epoch: int


class TagRow(msgspec.Struct, frozen=True, gc=False):
    """A tagged event as a row of `tag_views`, numbered among its journal's events with that tag.

    The struct is flat and in the order of the table's columns, because rows are converted by the million.
    """

    tag: str
    time_ms: int
    topic: str
    partition: int
    offset: int
    index: int
    epoch: int
    id: str
    #: The incarnation of the journal within which `tag_seq_nr` counts.
    incarnation_epoch: int
    incarnation_offset: int
    tag_seq_nr: int
    seq_nr: int
    timestamp_ms: int
    encoded: bytes

    @property
    def place(self) -> TagPosition:
        """The position of the event in the tag's stream."""
        return TagPosition(self.tag, self.time_ms, self.topic, self.partition, self.offset, self.index, self.epoch)

    @property
    def incarnation(self) -> Position:
        """The incarnation of the journal within which `tag_seq_nr` counts."""
        return Position(self.incarnation_epoch, self.incarnation_offset)

    @property
    def position(self) -> Position:
        """The position of the event's record in the log."""
        return Position(self.epoch, self.offset)

    @property
    def event(self) -> EventRow:
        """The event as a row of its journal."""
        return EventRow(self.seq_nr, self.encoded, self.timestamp_ms, self.position, self.index, self.time_ms)


class TopicPosition(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """The position of an event among all events of its topic: by log time, then by position in the log.

    The id separates records of two partitions that have the same time and offset.
    """

    time_ms: int
    epoch: int
    offset: int
    id: str
    seq_nr: int


class TopicRow(msgspec.Struct, frozen=True, gc=False):
    """An event as a row of its topic's stream, with the fields of its position first."""

    time_ms: int
    epoch: int
    offset: int
    id: str
    seq_nr: int
    index: int
    timestamp_ms: int
    encoded: bytes

    @property
    def place(self) -> TopicPosition:
        """The position of the event in the topic's stream."""
        return TopicPosition(self.time_ms, self.epoch, self.offset, self.id, self.seq_nr)

    @property
    def event(self) -> EventRow:
        """The event as a row of its journal."""
        position = Position(self.epoch, self.offset)
        return EventRow(self.seq_nr, self.encoded, self.timestamp_ms, position, self.index, self.time_ms)


def tag_row(tag: str, key: Key, partition: int, incarnation: Position, tag_seq_nr: int, event: EventRow) -> TagRow:
    """Return the `tag_views` row of an event for one of its tags."""
    at = event.position
    return TagRow(
        tag, event.time_ms, key.topic, partition, at.offset, event.index, at.epoch, key.id,
        incarnation.epoch, incarnation.offset, tag_seq_nr, event.seq_nr, event.timestamp_ms, event.encoded,
    )  # fmt: skip


class PutTags(msgspec.Struct, frozen=True, gc=False):
    """Write these tag rows, each with the stamp of its position, then the latest `tag_seq_nr` of each tag."""

    key: Key
    head: Head
    rows: tuple[TagRow, ...]


class PutEvents(msgspec.Struct, frozen=True, gc=False):
    """Write these event rows, each with the stamp of its position."""

    key: Key
    head: Head
    rows: tuple[EventRow, ...]


class PutSegments(msgspec.Struct, frozen=True, gc=False):
    """Add segments to the store's list of those that hold events of this incarnation before the head's last run.

    The head describes only the last contiguous run of segments, so an append that skips a whole segment lists the
    segments of the run before it. The list may contain segments without events: each costs only an empty read. It
    belongs to `head.incarnation` and may be written before the other writes of its slice.
    """

    key: Key
    head: Head
    segments: tuple[range, ...]


class PutHead(msgspec.Struct, frozen=True, gc=False):
    """Write the whole head, nulls included, with the stamp of its position. A grave is a head that is not live."""

    key: Key
    head: Head


class ClearEvents(msgspec.Struct, frozen=True, gc=False):
    """Delete the events above `above` up to the head's `delete_to`, with the tombstone stamp of the head's position.

    Tag rows are deleted before the events, because they are found through the events.
    """

    key: Key
    head: Head
    above: int
    #: Tag rows of events that were appended and deleted within this slice. This slice does not write them, but another
    #: replicator may have written them or may still do so.
    unwritten: tuple[TagPosition, ...] = ()
    clear_tags: bool = True


class ClearJournal(msgspec.Struct, frozen=True, gc=False):
    """Delete all data of a purged incarnation: tag rows, events of all segments up to its `seq_nr`, snapshots."""

    key: Key
    head: Head
    unwritten: tuple[TagPosition, ...] = ()
    clear_tags: bool = True


class ForgetSegments(msgspec.Struct, frozen=True, gc=False):
    """Remove segments whose events are all deleted from the store's list; for a grave, all segments.

    This comes after the clear of the events, so that a clear that is repeated after a crash still finds the segments.
    """

    key: Key
    head: Head


Write = PutEvents | PutSegments | PutTags | PutHead | ClearEvents | ClearJournal | ForgetSegments


class Pointer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The position and the log time through which a partition is replicated, both inclusive."""

    position: Position
    time_ms: int


def first_unreplicated_offset(
    replicated: Pointer | Head | None, topic: str, partition: int, config: TopicConfig
) -> int:
    """Return the first unreplicated offset of the configuration's epoch, according to a pointer or a stored head.

    It is 0 if that is missing, or of an earlier epoch. Raise `Fenced` if it is of a newer epoch: the caller's
    configuration is outdated, and the offsets of its epoch have no meaning.
    """
    if replicated is None or replicated.position.epoch < config.epoch:
        return 0
    if replicated.position.epoch > config.epoch:
        raise Fenced(
            f"{topic}/{partition} is replicated in epoch {replicated.position.epoch} and this process has the "
            f"configuration of epoch {config.epoch}: open the book again"
        )
    return replicated.position.offset + 1


class Parked(msgspec.Struct, frozen=True, gc=False):
    """A record that is stored separately for inspection, and has no effect.

    It is unreadable, or its key names no journal of its partition.
    """

    topic: str
    partition: int
    position: Position
    timestamp_ms: int
    id: str | None
    reason: str
    value: bytes
    #: The size of the whole record, if `value` holds only its first bytes.
    whole_bytes: int | None = None


class SliceWrites(msgspec.Struct, frozen=True, gc=False):
    """All writes of one slice of a partition. Keys may be written in any order; the pointer is written last."""

    topic: str
    partition: int
    #: The pointer as it was read before the heads. The slice begins at or before the position after it.
    began: Pointer | None
    pointer: Pointer
    keys: tuple[tuple[Write, ...], ...]
    parked: tuple[Parked, ...] = ()
    #: The log's id of the topic whose records these are, if it must still be the configured one.
    topic_id: str | None = None


def plan_key(
    key: Key,
    head: Head | None,
    records: Sequence[PositionedAction],
    config: TopicConfig,
    *,
    partition: int = 0,
    clear_tags: bool = True,
) -> tuple[Write, ...]:
    """Return the writes that bring one journal from `head`, as read from the store, to the end of `records`.

    `records` are in log order and may overlap what `head` already contains. With `clear_tags=False`, deleted and purged
    events remain in the streams of their tags.
    """
    writes: list[Write] = []
    skipped = 0
    cleared_before = False
    if head is not None:
        for record in records:
            if record.position > head.position:
                break
            skipped += 1
            cleared_before = cleared_before or isinstance(record.action, Delete | Purge)
        if skipped:
            # The replicator that wrote this head may have crashed before its other writes: repeat them, with the same
            # stamps.
            writes.append(PutHead(key, head))
            if cleared_before and not head.live:
                # A grave does not record whether its incarnation had tags, so tag rows are always cleared.
                writes += _clear_journal(ClearJournal(key, head, (), clear_tags))
    clear = cleared_before and head is not None and head.live
    clear_above = head.delete_to if head is not None and head.live and not cleared_before else 0

    current = head
    rows: list[EventRow] = []
    tags: list[TagRow] = []
    closed_runs: list[range] = []
    dirty = False
    for record in records[skipped:] if skipped else records:
        before = current
        current, change = fold(current, record.action, record.position, record.timestamp_ms, config)
        match change:
            case AppendApplied():
                assert current is not None
                if before is not None and before.live and before.run_start != current.run_start:
                    closed_runs += segments_between(before, clear_above, before.seq_nr)
                new_rows = _event_rows(record, change)
                rows += new_rows
                if record.action.tagged:  # type: ignore[union-attr]
                    tags += _tag_rows(key, partition, before, current.incarnation, record.action.tagged, new_rows)  # type: ignore[union-attr]
                dirty = True
            case PurgeApplied():
                assert current is not None
                assert before is not None
                unwritten = tuple(row.place for row in tags) if clear_tags else ()
                remaining_tags = () if clear_tags else tuple(tags)
                if closed_runs:
                    writes.append(PutSegments(key, current, tuple(closed_runs)))
                if remaining_tags:
                    writes.append(PutTags(key, current, remaining_tags))
                writes.append(PutHead(key, current))
                writes += _clear_journal(ClearJournal(key, current, unwritten, clear_tags and bool(before.tag_counts)))
                rows, tags, closed_runs, dirty, clear, clear_above = [], [], [], False, False, 0
            case DeleteApplied():
                dirty = clear = True
            case AppendRepeated() | Rejected() | RetryTooLate() | TooManyTags() | Stale() | Unchanged():
                pass
            case _:
                assert_never(change)
    if not (dirty or clear):
        return tuple(writes)
    assert current is not None
    tags_deleted_to = current.delete_to if clear_tags else 0
    if dirty:
        remaining_rows, remaining_tags = tuple(rows), tuple(tags)
        if current.delete_to:
            remaining_rows = tuple(row for row in rows if row.seq_nr > current.delete_to)
            remaining_tags = tuple(row for row in tags if row.seq_nr > tags_deleted_to)
        if closed_runs:
            writes.append(PutSegments(key, current, tuple(closed_runs)))
        if remaining_rows:
            writes.append(PutEvents(key, current, remaining_rows))
        if remaining_tags:
            writes.append(PutTags(key, current, remaining_tags))
        writes.append(PutHead(key, current))
    if clear:
        unwritten = tuple(row.place for row in tags if row.seq_nr <= tags_deleted_to)
        writes.append(ClearEvents(key, current, clear_above, unwritten, clear_tags))
        if current.run_start:
            writes.append(ForgetSegments(key, current))
    return tuple(writes)


def _clear_journal(write: ClearJournal) -> tuple[Write, ...]:
    return (write, ForgetSegments(write.key, write.head)) if write.head.run_start else (write,)


def _tag_rows(
    key: Key,
    partition: int,
    before: Head | None,
    incarnation: Position,
    tagged: Sequence[tuple[str, int]],
    rows: Sequence[EventRow],
) -> list[TagRow]:
    """Return the tag rows of one record's events."""
    counts = before.tag_counts if before is not None and before.live else {}
    if len(rows) == 1 or all(count == len(rows) for _, count in tagged):
        # Every event carries every tag of the record, so the envelope suffices and no event is decoded.
        return [
            tag_row(tag, key, partition, incarnation, number, row)
            for tag, _ in tagged
            for number, row in enumerate(rows, counts.get(tag, 0) + 1)
        ]
    tag_rows = []
    counts = dict(counts)
    for row in rows:
        for tag in event_tags(row.encoded):
            counts[tag] = number = counts.get(tag, 0) + 1
            tag_rows.append(tag_row(tag, key, partition, incarnation, number, row))
    return tag_rows


def _event_rows(record: PositionedAction, change: AppendApplied) -> list[EventRow]:
    assert isinstance(record.action, Append)
    first, timestamp_ms, position, time_ms = change.first, record.timestamp_ms, record.position, record.time_ms
    encoded = unpack_events(record.action.body)
    if len(encoded) == 1:
        return [EventRow(first, encoded[0], timestamp_ms, position, 0, time_ms)]
    return [EventRow(first + i, event, timestamp_ms, position, i, time_ms) for i, event in enumerate(encoded)]


def advance_time(time_ms: int, timestamp_ms: int, action: Action | Damaged) -> int:
    """Return the log time at a record, given `time_ms`, the log time at the record before it. It never decreases.

    A tick (a mark with a time) advances it too, unless that time is more than TICK_AHEAD_MS_MAX after the timestamp of
    its own record.
    """
    if isinstance(action, Mark) and action.time_ms is not None and action.time_ms <= timestamp_ms + TICK_AHEAD_MS_MAX:
        time_ms = max(time_ms, action.time_ms)
    return max(time_ms, timestamp_ms)


#: How much earlier than the log time a record's timestamp may be: a broker's clock may be set back.
RECORD_LAG_MS_MAX: Final = 86_400_000


def may_remove_grave(grave: Head, pointer: Pointer | None, log_start: Position) -> bool:
    """Return whether a grave may be removed without changing how any later record is folded.

    The log must start after the grave, so that no record before it is folded again, and the log time must be so late
    that the grave's append ids have expired for every future record. Reads that began before the purge finish far
    sooner than that.
    """
    if grave.live or pointer is None or not grave.position <= pointer.position or not grave.position < log_start:
        return False
    return pointer.time_ms - grave.touched_ms > GRAVE_RETENTION_MS + RECORD_LAG_MS_MAX


def segments_between(head: Head, above: int, to: int) -> list[range]:
    """Return the segments of the head's last run that may hold events above `above` up to `to`.

    Segments before that run are found through the store's list of segments (`listed_between`).
    """
    if to <= above:
        return []
    size = head.segment_size
    first, last = max(above // size, head.run_start), (to - 1) // size
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


def listed_between(head: Head, above: int, to: int) -> range:
    """Return the range of segments before the head's last run that may hold events above `above` up to `to`.

    Only the segments of this range that the store lists (`PutSegments`) hold events.
    """
    if to <= above:
        return range(0)
    return range(above // head.segment_size, min((to - 1) // head.segment_size + 1, head.run_start))
