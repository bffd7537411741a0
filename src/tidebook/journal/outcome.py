"""What came of an append, as its caller learns it."""

from __future__ import annotations

import msgspec

from tidebook.core.action import Append
from tidebook.core.errors import Conflict, Fenced, InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.fold import Appended as Added
from tidebook.core.fold import Change, Crowded, Forgotten, Lost, Repeated, Stale, is_crowded, may_be_forgotten
from tidebook.core.head import JOURNAL_TAGS_MAX, Head
from tidebook.core.key import Key
from tidebook.core.position import Position


class Appended(msgspec.Struct, frozen=True, gc=False):
    """The events are in the journal as numbers `first` to `last`; both are None where the outcome was not awaited."""

    first: int | None
    last: int | None
    partition: int
    offset: int


def answer(
    change: Change, topic: str, id: str, action: Append, partition: int, position: Position
) -> Appended | TidebookError:
    """The caller's view of what the fold said."""
    match change:
        case Added():
            return Appended(change.first, change.last, partition, position.offset)
        case Repeated():
            return Appended(change.first, change.last, partition, change.position.offset)
        case Lost():
            return Conflict(key=Key(topic, id), expected=action.expected, at=action.at, found=change.found)
        case Crowded():
            return crowded(Key(topic, id))
        case Stale():
            return Fenced(
                f"{topic}/{id}: the topic has moved on from epoch {action.epoch} to {position.epoch}: "
                "open the book again"
            )
        case Forgotten():
            return OutcomeUnknown(
                f"{topic}/{id}: this retry comes too late: more than 16 appends followed, so whether the first attempt "
                "happened is no longer known; read the journal to see",
                append_id=action.append_id,
                partition=partition,
                offset=position.offset,
            )
        case _:
            raise AssertionError(f"an append cannot end as {change}")


def crowded(key: Key) -> InvalidInput:
    """What the caller of an append is told that brings too many different tags."""
    return InvalidInput(
        f"{key}: the events of one journal may carry {JOURNAL_TAGS_MAX:,} different tags, and this append would bring "
        "more: tags name kinds of events; what differs in each event belongs in its payload or metadata"
    )


def answer_from_head(
    head: Head | None, key: Key, action: Append, partition: int, position: Position
) -> Appended | TidebookError:
    """The outcome of an append that was replicated before this process could fold it."""
    for recent in head.recent if head is not None else ():
        if recent.append_id == action.append_id:
            return Appended(recent.first, recent.last, partition, recent.position.offset)
    # It is not among those that count. Either it was void, or it is forgotten by now; and a retry may have been void
    # because its first attempt was forgotten.
    late = head is not None and action.floor is not None and may_be_forgotten(head, action.floor, position.epoch)
    if not late and (head is None or head.evicted is None or head.evicted < position):
        if is_crowded(head, action):
            return crowded(key)
        return Conflict(
            key=key, expected=action.expected, at=action.at, found=head.seq_nr if head is not None and head.live else 0
        )
    return OutcomeUnknown(
        f"{key}: too many appends followed this one to tell its outcome; read the journal to see",
        append_id=action.append_id,
        partition=partition,
        offset=position.offset,
    )
