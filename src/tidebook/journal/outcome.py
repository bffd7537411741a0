"""The outcome of an append, as its caller receives it."""

from __future__ import annotations

import msgspec

from tidebook.core.action import Append
from tidebook.core.errors import Conflict, Fenced, InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.fold import (
    AppendApplied,
    AppendRepeated,
    Change,
    Rejected,
    RetryTooLate,
    Stale,
    TooManyTags,
    has_too_many_tags,
    may_be_evicted,
)
from tidebook.core.head import JOURNAL_TAGS_MAX, Head
from tidebook.core.key import Key
from tidebook.core.position import Position


class Appended(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The events are in the journal as numbers `first` to `last`; with `confirm=False` both may be None.

    The result of a repeated append equals that of the first attempt.
    """

    first: int | None
    last: int | None
    partition: int
    offset: int
    #: Whether an earlier attempt, or another process, had appended them under the same append id.
    repeated: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Appended) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    @property
    def _place(self) -> tuple[int | None, int | None, int, int]:
        return self.first, self.last, self.partition, self.offset


def outcome_of(
    change: Change, topic: str, id: str, action: Append, partition: int, position: Position
) -> Appended | TidebookError:
    """Translate the change that the fold computed for an append into its result or its error."""
    match change:
        case AppendApplied():
            return Appended(change.first, change.last, partition, position.offset)
        case AppendRepeated():
            return Appended(change.first, change.last, partition, change.position.offset, repeated=True)
        case Rejected():
            found = None if change.found == action.expected else change.found  # in another incarnation
            return Conflict(key=Key(topic, id), expected=action.expected, at=action.at, found=found)
        case TooManyTags():
            return too_many_tags(Key(topic, id))
        case Stale():
            return Fenced(
                f"{topic}/{id}: the topic has moved on from epoch {action.epoch} to {position.epoch}: "
                "open the book again"
            )
        case RetryTooLate():
            return OutcomeUnknown(
                f"{topic}/{id}: this retry comes too late: more than 16 appends may have followed the first attempt, "
                "so whether that was applied is no longer known; read the journal to find out",
                append_id=action.append_id,
                partition=partition,
                offset=position.offset,
            )
        case _:
            raise AssertionError(f"an append cannot end as {change}")


def too_many_tags(key: Key) -> InvalidInput:
    """Return the error for an append that would exceed the number of different tags of a journal."""
    return InvalidInput(
        f"{key}: the events of one journal may carry {JOURNAL_TAGS_MAX:,} different tags, and this append would exceed "
        "that: use tags for kinds of events, and the payload or metadata for values that differ in each event"
    )


def outcome_from_head(
    head: Head | None, key: Key, action: Append, partition: int, position: Position
) -> Appended | TidebookError:
    """Return the outcome of an append that was replicated before this process could fold it."""
    for recent in head.recent if head is not None else ():
        if recent.append_id == action.append_id:
            repeated = recent.position != position
            return Appended(recent.first, recent.last, partition, recent.position.offset, repeated=repeated)
    # The append is not among the recent ones: it was void, or it has been evicted. A retry may also have been void
    # because its first attempt had been evicted.
    late = head is not None and action.floor is not None and may_be_evicted(head, action.floor, position.epoch)
    if not late and (head is None or head.evicted is None or head.evicted < position):
        if has_too_many_tags(head, action):
            return too_many_tags(key)
        found = _seq_nr_at(head, position)
        if found == action.expected:  # not a conflict, so the head at that position is no longer known
            found = None
        return Conflict(key=key, expected=action.expected, at=action.at, found=found)
    return OutcomeUnknown(
        f"{key}: too many appends followed this one to determine its outcome; read the journal to find out",
        append_id=action.append_id,
        partition=partition,
        offset=position.offset,
    )


def _seq_nr_at(head: Head | None, position: Position) -> int | None:
    """Return the last seq_nr before `position`, from a head at or after it; None if that head does not know it."""
    if head is None:
        return 0
    if head.position < position:
        return head.seq_nr if head.live else 0
    # The head of a purged journal still has the recent appends of the purged incarnation.
    before = [each for each in head.recent if head.incarnation <= each.position < position]
    return before[-1].last if before else None
