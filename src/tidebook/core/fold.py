"""The fold: the single definition of what an action does to a journal.

The replicator, the reader's tail, the head cache and `verify` all call `fold`; none of them reimplements it.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from tidebook.core.action import NEVER, Action, Append, Damaged, Delete, Mark, Purge, Seal
from tidebook.core.head import GRAVE_RETENTION_MS, JOURNAL_TAGS_MAX, RECENT_MAX, Head, Jump, RecentAppend
from tidebook.core.position import Position
from tidebook.core.segments import event_segment
from tidebook.core.seq_nr import LAST
from tidebook.core.topic_config import TopicConfig


class AppendApplied(msgspec.Struct, frozen=True, gc=False):
    """The append added events `first` to `last`; the last number before it was `after`."""

    first: int
    last: int
    after: int


class AppendRepeated(msgspec.Struct, frozen=True, gc=False):
    """The append is a retry of one that was already applied: nothing changed. The fields are the first result."""

    first: int
    last: int
    position: Position


class DeleteApplied(msgspec.Struct, frozen=True, gc=False):
    """The events above `before` up to `to` are deleted."""

    before: int
    to: int


class PurgeApplied(msgspec.Struct, frozen=True, gc=False):
    """The journal is purged; only its grave remains."""


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """The append has no effect: the journal contradicts its `expected`, `at` or `incarnation`, or is too near LAST.

    `found` is the journal's last number.
    """

    found: int


class RetryTooLate(msgspec.Struct, frozen=True, gc=False):
    """The retry has no effect, because it came too late to determine whether the first attempt was applied."""


class TooManyTags(msgspec.Struct, frozen=True, gc=False):
    """The append has no effect: the journal would have more than JOURNAL_TAGS_MAX different tags."""


class Stale(msgspec.Struct, frozen=True, gc=False):
    """The record has no effect: it was written for another epoch than the one it is in."""


class Unchanged(msgspec.Struct, frozen=True, gc=False):
    """The record changes no journal: for example a mark, a delete of deleted events, or a damaged record."""


UNCHANGED = Unchanged()
STALE = Stale()

Change = (
    AppendApplied
    | AppendRepeated
    | DeleteApplied
    | PurgeApplied
    | Rejected
    | RetryTooLate
    | TooManyTags
    | Stale
    | Unchanged
)


def fold(
    head: Head | None, action: Action | Damaged, at: Position, timestamp_ms: int, config: TopicConfig
) -> tuple[Head | None, Change]:
    """Apply the action at position `at` to a journal; return the new head and what changed.

    A grave is treated as a missing journal, except that its recent appends still identify retries. An action without
    effect returns the same head object.
    """
    match action:
        case Append():
            return _append(head, action, at, timestamp_ms, config)
        case Mark() | Seal() | Damaged():
            return head, UNCHANGED
        case Delete():
            return _delete(head, action, at, timestamp_ms, config)
        case Purge():
            return _purge(head, action, at, timestamp_ms)
        case _:
            assert_never(action)


def _append(
    head: Head | None, action: Append, at: Position, timestamp_ms: int, config: TopicConfig
) -> tuple[Head | None, Change]:
    if action.epoch != at.epoch:
        return head, STALE
    past = head if head is None or head.live else _unless_expired(head, timestamp_ms)
    if past is not None:
        append_id = action.append_id
        for known in past.recent:
            if known.append_id == append_id:
                return head, AppendRepeated(known.first, known.last, known.position)
        if action.floor is not None and may_be_evicted(past, action.floor, at.epoch):
            return head, RetryTooLate()
    if action.tagged and has_too_many_tags(head, action):
        return head, TooManyTags()
    last = head.seq_nr if head is not None and head.live else 0
    if action.expected is not None:
        if action.expected != last or not _is_expected_incarnation(head, action):
            return head, Rejected(last)
        first = last + 1
    elif action.at is not None:
        if action.at <= last:
            return head, Rejected(last)
        first = action.at
    else:
        first = last + 1
    new_last = first + action.count - 1
    if new_last > LAST:
        return head, Rejected(last)
    recent: tuple[RecentAppend, ...] = (RecentAppend(action.append_id, first, new_last, at),)
    evicted = None
    if past is not None:
        recent, evicted = past.recent + recent, past.evicted
        if len(recent) > RECENT_MAX:
            evicted, recent = recent[-RECENT_MAX - 1].position, recent[-RECENT_MAX:]
    delete_to, incarnation, segment_size, expire_after_ms = 0, at, config.segment_size, None
    jumps: tuple[Jump, ...] = ()
    run_start = 0
    tag_counts: dict[str, int] = {}
    if head is not None and head.live:
        delete_to, incarnation, segment_size = head.delete_to, head.incarnation, head.segment_size
        expire_after_ms, jumps, tag_counts = head.expire_after_ms, head.jumps, head.tag_counts
        run_start = head.run_start
    if action.tagged:
        tag_counts = tag_counts | {tag: tag_counts.get(tag, 0) + count for tag, count in action.tagged}
    if action.expire_after_ms is not None:
        expire_after_ms = None if action.expire_after_ms == NEVER else action.expire_after_ms
    # The second comparison decides and implies the first, which is cheap and excludes nearly all appends.
    if first - last > segment_size and event_segment(first, segment_size) > event_segment(last, segment_size) + 1:
        run_start, jumps = event_segment(first, segment_size), ()
    return (
        Head(
            True, new_last, delete_to, incarnation, at, segment_size,
            expire_after_ms, timestamp_ms, recent, evicted, jumps, tag_counts, run_start,
        ),
        AppendApplied(first, new_last, last),
    )  # fmt: skip


def _is_expected_incarnation(head: Head | None, action: Append) -> bool:
    return action.incarnation is None or (head is not None and head.live and head.incarnation == action.incarnation)


def _unless_expired(grave: Head, timestamp_ms: int) -> Head | None:
    """Return the grave, or None once its retention is over.

    That is decided by the timestamps of records and not by when graves are removed from the store, so that every
    process expires a grave at the same record.
    """
    return grave if timestamp_ms - grave.touched_ms <= GRAVE_RETENTION_MS else None


def has_too_many_tags(head: Head | None, action: Append) -> bool:
    """Return whether the journal would have more than JOURNAL_TAGS_MAX different tags after this append."""
    known = head.tag_counts if head is not None and head.live else {}
    if len(known) + len(action.tagged) <= JOURNAL_TAGS_MAX:
        return False
    return len(known.keys() | {tag for tag, _ in action.tagged}) > JOURNAL_TAGS_MAX


def may_be_evicted(head: Head, floor: int, epoch: int) -> bool:
    """Return whether an append first attempted at offset `floor` or later may be evicted from `head.recent`.

    A `floor` below 0 means that the first attempt was made in an earlier epoch or at an unknown offset.
    """
    return head.evicted is not None and (floor < 0 or Position(epoch, floor) <= head.evicted)


def _delete(
    head: Head | None, action: Delete, at: Position, timestamp_ms: int, config: TopicConfig
) -> tuple[Head | None, Change]:
    if action.epoch != at.epoch:
        return head, STALE
    if head is not None and head.live:
        if action.incarnation is not None and action.incarnation != head.incarnation:
            return head, UNCHANGED
        to = min(action.to, head.seq_nr)
        if to <= head.delete_to:
            return head, UNCHANGED
        return msgspec.structs.replace(head, delete_to=to, position=at), DeleteApplied(head.delete_to, to)
    if action.incarnation is not None or action.to < 1:
        return head, UNCHANGED
    past = None if head is None else _unless_expired(head, timestamp_ms)
    recent, evicted = (past.recent, past.evicted) if past is not None else ((), None)
    new = Head(
        True, action.to, action.to, at, at, config.segment_size, None, timestamp_ms, recent, evicted, (), {},
        event_segment(action.to + 1, config.segment_size),
    )  # fmt: skip
    return new, DeleteApplied(0, action.to)


def _purge(head: Head | None, action: Purge, at: Position, timestamp_ms: int) -> tuple[Head | None, Change]:
    if action.epoch != at.epoch:
        return head, STALE
    if head is None or not head.live:
        return head, UNCHANGED
    if action.if_position is not None and action.if_position != head.position:
        return head, UNCHANGED
    # Drop what only a live journal needs: there may be as many graves as journals were ever created.
    grave = msgspec.structs.replace(
        head, live=False, position=at, expire_after_ms=None, touched_ms=timestamp_ms, tag_counts={}
    )
    return grave, PurgeApplied()
