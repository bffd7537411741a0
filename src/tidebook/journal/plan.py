"""The plan of a read: a pure decision from the store's head and the folded tail."""

from __future__ import annotations

import msgspec

from tidebook.core.head import Head
from tidebook.core.position import Position


class Nothing(msgspec.Struct, frozen=True):
    """There is no journal, or no event in the requested range."""


class StoreOnly(msgspec.Struct, frozen=True):
    """Read the rows after `after` up to `to` from the store."""

    after: int
    to: int


class StoreThenTail(msgspec.Struct, frozen=True):
    """Read the rows after `after` up to `to` from the store, then the tail's events after `to`."""

    after: int
    to: int


class TailOnly(msgspec.Struct, frozen=True):
    """Read the tail's events after `after`: the store has no journal, a purged one, or no row after `after`."""

    after: int


ReadPlan = Nothing | StoreOnly | StoreThenTail | TailOnly


def plan_read(
    *, stored: Head | None, folded: Head | None, purged: bool, appended: bool, after: int, to: int
) -> ReadPlan:
    """Decide where the events after `after` up to `to` are read from.

    `stored` is the store's head; `folded` is that head with the tail folded onto it, up to the barrier. `purged` says
    that the tail purges the stored incarnation, `appended` that it adds events to the current one.
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


def page_is_valid(planned: Head, now: Head | None, cursor: int) -> bool:
    """Return whether a page read after `cursor` may be yielded, given the head `now` that was read after the page."""
    return now is not None and now.live and now.incarnation == planned.incarnation and now.delete_to <= cursor


def may_continue(incarnation: Position, folded: Head | None, cursor: int) -> bool:
    """Return whether a read that yielded up to `cursor` may continue: same incarnation, nothing after it deleted."""
    return folded is not None and folded.live and folded.incarnation == incarnation and folded.delete_to <= cursor
