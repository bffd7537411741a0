"""Mending one journal in the store from the log: decided elsewhere, carried out by a store."""

from __future__ import annotations

import msgspec

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication import EventRow, Pointer, TagPlace, TagRow

#: Three bits of a stamp: a mend wins over what it mends, and loses to everything that comes later in the log.
REV_MAX = 7


class Mend(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What must lie there, and what must not."""

    key: Key
    partition: int
    #: How far the log was folded for this. Where rows have no stamps, a store that stands elsewhere refuses the mend.
    pointer: Pointer
    rev: int
    #: The whole head; a grave where the log knows of no journal.
    head: Head
    rows: tuple[EventRow, ...] = ()
    tags: tuple[TagRow, ...] = ()
    #: Numbers of events, and places of tag rows, that the log knows nothing of.
    extra_rows: tuple[int, ...] = ()
    extra_tags: tuple[TagPlace, ...] = ()
