"""What a read does next, decided purely from what it has learned."""

from __future__ import annotations

import msgspec

from tidebook.core.head import Head
from tidebook.core.position import Position


class Nothing(msgspec.Struct, frozen=True):
    """There is no journal, or nothing in the range asked for."""


class StoreOnly(msgspec.Struct, frozen=True):
    """Rows above `after` up to `to`, from the store."""

    after: int
    to: int


class StoreThenTail(msgspec.Struct, frozen=True):
    """Rows above `after` up to `to` from the store, then the tail's events above `to`."""

    after: int
    to: int


class TailOnly(msgspec.Struct, frozen=True):
    """The tail's events above `after`: the store has no journal, or one that the tail purges."""

    after: int


ReadPlan = Nothing | StoreOnly | StoreThenTail | TailOnly


def plan_read(
    *, stored: Head | None, folded: Head | None, purged: bool, appended: bool, after: int, to: int
) -> ReadPlan:
    """`stored` is the store's head, `folded` the same with the tail up to the barrier on top.

    `purged` and `appended` tell whether the tail purges the stored life and adds events to the present one.
    """
    if folded is None or not folded.live:
        return Nothing()
    after = max(after, folded.delete_to)
    if after >= min(to, folded.seq_nr):
        return Nothing()
    if stored is None or not stored.live or purged:
        return TailOnly(after)
    if after >= stored.seq_nr:
        return TailOnly(after)
    if appended and to > stored.seq_nr:
        return StoreThenTail(after, stored.seq_nr)
    return StoreOnly(after, min(to, stored.seq_nr))


def page_stands(planned: Head, now: Head | None, cursor: int) -> bool:
    """Whether a page that was read behind `cursor` may be yielded, from the head as it is after the page was read."""
    return now is not None and now.live and now.incarnation == planned.incarnation and now.delete_to <= cursor


def may_go_on(life: Position, folded: Head | None, cursor: int) -> bool:
    """Whether a read that has yielded up to `cursor` may go on from a new plan, with no hole and no other life."""
    return folded is not None and folded.live and folded.incarnation == life and folded.delete_to <= cursor
