"""The fold: the one definition of what an action does to a journal.

The replicator, the reader's tail, the head cache and `verify` all call it; none repeats it.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from tidebook.core.action import NEVER, Action, Append, Damaged, Delete, Mark, Purge, Seal
from tidebook.core.head import JOURNAL_TAGS_MAX, JUMPS_MAX, RECENT_MAX, Head, Jump, Recent
from tidebook.core.position import Position
from tidebook.core.seq_nr import LAST
from tidebook.core.topic import TopicFacts


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Events `first` to `last` were added behind `after`."""

    first: int
    last: int
    after: int


class Repeated(msgspec.Struct, frozen=True, gc=False):
    """A retry of an append that had already happened: nothing changed, and this is what came of it then."""

    first: int
    last: int
    position: Position


class Deleted(msgspec.Struct, frozen=True, gc=False):
    """Events above `before` and up to `to` are gone."""

    before: int
    to: int


class Purged(msgspec.Struct, frozen=True, gc=False):
    """The journal is gone; a grave remains."""


class Lost(msgspec.Struct, frozen=True, gc=False):
    """Void: the journal stands at `found`, not where the append wanted it."""

    found: int


class Forgotten(msgspec.Struct, frozen=True, gc=False):
    """Void: a retry that comes too late to tell whether its first attempt had happened."""


class Crowded(msgspec.Struct, frozen=True, gc=False):
    """Void: the journal would have more different tags than its head can count."""


class Stale(msgspec.Struct, frozen=True, gc=False):
    """Void: written for an epoch that is not the topic's."""


class Unchanged(msgspec.Struct, frozen=True, gc=False):
    """Nothing to do: a mark, a purge of nothing, a delete that was already done, a damaged record."""


UNCHANGED = Unchanged()
STALE = Stale()

Change = Appended | Repeated | Deleted | Purged | Lost | Forgotten | Crowded | Stale | Unchanged


def fold(
    head: Head | None, action: Action | Damaged, at: Position, timestamp_ms: int, facts: TopicFacts
) -> tuple[Head | None, Change]:
    """State of a journal + action at a log position → new state + change.

    A grave folds as no journal. What is void returns the very head that was given.
    """
    match action:
        case Append():
            return _append(head, action, at, timestamp_ms, facts)
        case Mark() | Seal() | Damaged():
            return head, UNCHANGED
        case Delete():
            return _delete(head, action, at, timestamp_ms, facts)
        case Purge():
            return _purge(head, action, at)
        case _:
            assert_never(action)


def _append(
    head: Head | None, action: Append, at: Position, timestamp_ms: int, facts: TopicFacts
) -> tuple[Head | None, Change]:
    if action.epoch != at.epoch:
        return head, STALE
    if head is not None:
        append_id = action.append_id
        for known in head.recent:
            if known.append_id == append_id:
                return head, Repeated(known.first, known.last, known.position)
        if action.floor is not None and may_be_forgotten(head, action.floor, at.epoch):
            return head, Forgotten()
    if is_crowded(head, action):
        return head, Crowded()
    last = head.seq_nr if head is not None and head.live else 0
    if action.expected is not None:
        if action.expected != last:
            return head, Lost(last)
        first = last + 1
    elif action.at is not None:
        if action.at <= last:
            return head, Lost(last)
        first = action.at
    else:
        first = last + 1
    new_last = first + action.count - 1
    if new_last > LAST:
        return head, Lost(last)
    recent: tuple[Recent, ...] = (Recent(action.append_id, first, new_last, at),)
    evicted = None
    if head is not None:
        recent, evicted = head.recent + recent, head.evicted
        if len(recent) > RECENT_MAX:
            evicted, recent = recent[-RECENT_MAX - 1].position, recent[-RECENT_MAX:]
    delete_to, incarnation, segment_size, expire_after_ms = 0, at, facts.segment_size, None
    jumps: tuple[Jump, ...] = ()
    tag_counts: dict[str, int] = {}
    if head is not None and head.live:
        delete_to, incarnation, segment_size = head.delete_to, head.incarnation, head.segment_size
        expire_after_ms, jumps, tag_counts = head.expire_after_ms, head.jumps, head.tag_counts
    if action.tagged:
        tag_counts = tag_counts | {tag: tag_counts.get(tag, 0) + count for tag, count in action.tagged}
    if action.expire_after_ms is not None:
        expire_after_ms = None if action.expire_after_ms == NEVER else action.expire_after_ms
    if first - last > segment_size:
        jumps = _remember(jumps, Jump(last, first))
    return (
        Head(
            True, new_last, delete_to, incarnation, at, segment_size,
            expire_after_ms, timestamp_ms, recent, evicted, jumps, tag_counts,
        ),
        Appended(first, new_last, last),
    )  # fmt: skip


def is_crowded(head: Head | None, action: Append) -> bool:
    """Whether an append would bring the journal more different tags than a head can count."""
    known = head.tag_counts if head is not None and head.live else {}
    if len(known) + len(action.tagged) <= JOURNAL_TAGS_MAX:
        return False
    return len(known.keys() | {tag for tag, _ in action.tagged}) > JOURNAL_TAGS_MAX


def may_be_forgotten(head: Head, floor: int, epoch: int) -> bool:
    """Whether the head may have forgotten an append whose first attempt was made at or behind `floor`.

    A floor below 0: it was made in an earlier epoch, or nobody knows when.
    """
    return head.evicted is not None and (floor < 0 or Position(epoch, floor) <= head.evicted)


def _remember(jumps: tuple[Jump, ...], jump: Jump) -> tuple[Jump, ...]:
    jumps = (*jumps, jump)
    if len(jumps) > JUMPS_MAX:
        narrowest = min(jumps, key=lambda each: each.next - each.last)
        jumps = tuple(each for each in jumps if each is not narrowest)
    return jumps


def _delete(
    head: Head | None, action: Delete, at: Position, timestamp_ms: int, facts: TopicFacts
) -> tuple[Head | None, Change]:
    if action.epoch != at.epoch:
        return head, STALE
    if head is not None and head.live:
        if action.incarnation is not None and action.incarnation != head.incarnation:
            return head, UNCHANGED
        to = min(action.to, head.seq_nr)
        if to <= head.delete_to:
            return head, UNCHANGED
        return msgspec.structs.replace(head, delete_to=to, position=at), Deleted(head.delete_to, to)
    if action.incarnation is not None or action.to < 1:
        return head, UNCHANGED
    jumps = (Jump(0, action.to + 1),) if action.to >= facts.segment_size else ()
    recent, evicted = (head.recent, head.evicted) if head is not None else ((), None)
    new = Head(
        True, action.to, action.to, at, at, facts.segment_size, None, timestamp_ms, recent, evicted, jumps,
    )  # fmt: skip
    return new, Deleted(0, action.to)


def _purge(head: Head | None, action: Purge, at: Position) -> tuple[Head | None, Change]:
    if action.epoch != at.epoch:
        return head, STALE
    if head is None or not head.live:
        return head, UNCHANGED
    if action.if_position is not None and action.if_position != head.position:
        return head, UNCHANGED
    return msgspec.structs.replace(head, live=False, position=at), Purged()
