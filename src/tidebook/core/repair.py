"""The repair of one journal in the store from the log, as a value. `verify` decides on it, a store applies it."""

from __future__ import annotations

import msgspec

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication_plan import EventRow, Pointer, TagPosition, TagRow

#: A stamp has three bits for the revision: a repair overwrites what it repairs, and every later record of the log
#: overwrites the repair.
REV_MAX = 7


class Damage(msgspec.Struct, frozen=True, gc=False):
    """A row of the store that cannot be decoded and must be repaired from the log."""

    #: `head`, `event` or `tag`.
    what: str
    topic: str
    #: None for a tag row whose journal cannot be determined.
    id: str | None
    reason: str
    #: For an event row: its number, which is that of its last event if several events share the row.
    seq_nr: int | None = None
    #: For a tag row: its position in the stream.
    place: TagPosition | None = None


class Repair(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The rows that a journal must have in the store, and the rows to remove."""

    key: Key
    partition: int
    #: How far the log was folded. A store without write timestamps refuses the repair if its own pointer differs.
    pointer: Pointer
    rev: int
    #: The complete head; a grave if the log contains no such journal.
    head: Head
    rows: tuple[EventRow, ...] = ()
    tags: tuple[TagRow, ...] = ()
    #: All segments before the head's last run that hold events, repaired or not, to replace the store's list of them.
    segments: tuple[int, ...] = ()
    #: Numbers of event rows, and positions of tag rows, that are not in the log and must be removed.
    extra_rows: tuple[int, ...] = ()
    extra_tags: tuple[TagPosition, ...] = ()
    #: Numbers of the event rows that cannot be decoded. Those to be repaired are also in `rows` or `extra_rows`.
    damaged_rows: frozenset[int] = frozenset()
