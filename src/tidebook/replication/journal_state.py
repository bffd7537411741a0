"""Fold one journal from the log, and compare the result with the state in the store. Everything here is pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

import msgspec

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.core.repair import Damage, Repair
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    EventRow,
    ForgetSegments,
    Pointer,
    PositionedAction,
    PutEvents,
    PutHead,
    PutSegments,
    PutTags,
    TagPosition,
    TagRow,
    Write,
    plan_key,
)
from tidebook.core.segments import event_segment
from tidebook.core.seq_nr import LAST
from tidebook.core.topic_config import TopicConfig


class JournalState(msgspec.Struct):
    """Everything that a store holds of one journal: the head, the event rows and the tag rows."""

    head: Head | None = None
    rows: dict[int, EventRow] = msgspec.field(default_factory=dict)
    tags: dict[TagPosition, TagRow] = msgspec.field(default_factory=dict)
    #: Rows that cannot be decoded; they are in none of the other fields.
    damaged: tuple[Damage, ...] = ()

    @property
    def head_damaged(self) -> bool:
        """Return whether the head cannot be decoded."""
        return any(each.what == "head" for each in self.damaged)

    @property
    def damaged_rows(self) -> frozenset[int]:
        """Return the sequence numbers of the event rows that cannot be decoded."""
        return frozenset(each.seq_nr for each in self.damaged if each.what == "event" and each.seq_nr is not None)

    @property
    def damaged_tags(self) -> frozenset[TagPosition]:
        """Return the positions of the tag rows that cannot be decoded."""
        return frozenset(each.place for each in self.damaged if each.place is not None)

    def apply(self, writes: Iterable[Write]) -> None:
        """Apply the writes of a key as a store does."""
        for write in writes:
            match write:
                case PutEvents():
                    self.rows.update((row.seq_nr, row) for row in write.rows)
                case PutTags():
                    self.tags.update((row.place, row) for row in write.rows)
                case PutHead():
                    self.head = write.head
                case ClearEvents():
                    deleted_to = write.head.delete_to
                    self.rows = {seq_nr: row for seq_nr, row in self.rows.items() if seq_nr > deleted_to}
                    if write.clear_tags:
                        self.tags = {place: row for place, row in self.tags.items() if row.seq_nr > deleted_to}
                case ClearJournal():
                    self.rows.clear()
                    if write.clear_tags:
                        self.tags.clear()
                case PutSegments() | ForgetSegments():
                    pass  # the segment index is internal to a store
                case _:
                    assert_never(write)

    def up_to(self, position: Position) -> JournalState:
        """Return the state without later rows: a replicator writes rows before it moves the head and the pointer."""
        rows = {seq_nr: row for seq_nr, row in self.rows.items() if row.position <= position}
        tags = {place: row for place, row in self.tags.items() if row.position <= position}
        return JournalState(self.head, rows, tags, self.damaged)


class Difference(msgspec.Struct, frozen=True):
    """One difference between the store and the fold of the log."""

    #: `head`, `event` or `tag`, followed by `missing`, `extra`, `differs` or `damaged`; or `moving` for a journal that
    #: changed during every attempt to compare it.
    what: str
    topic: str
    id: str
    partition: int
    seq_nr: int | None = None
    expected: str | None = None
    found: str | None = None
    repaired: bool = False


class FoldedJournal(msgspec.Struct, frozen=True):
    """A journal folded from the log's records at `since` and after."""

    key: Key
    partition: int
    state: JournalState
    since: Position
    #: Whether the journal began before `since`, so that its older part was taken from the store.
    partial: bool


def fold_journal(
    key: Key,
    partition: int,
    found: JournalState,
    actions: Iterable[PositionedAction],
    config: TopicConfig,
    since: Position,
    *,
    clear_tags: bool = True,
) -> FoldedJournal:
    """Fold a journal's records at `since` and after, on top of the older part that the store holds."""
    head = found.head
    partial = head is not None and head.incarnation < since
    state = JournalState()
    if partial:
        last = _last_before(found, since)
        if last is None:  # the remaining records do not determine the journal
            return FoldedJournal(key, partition, found, since, True)
        state = _state_before(found, since, last)
    start = since
    if head is not None and not partial:
        # An earlier incarnation that began before the log's start cannot be folded, and is not needed.
        start = max(since, head.incarnation) if since.offset > 0 else since
    remaining = [each for each in actions if each.position >= start]
    state.apply(plan_key(key, state.head, remaining, config, partition=partition, clear_tags=clear_tags))
    return FoldedJournal(key, partition, state, since, partial)


def _last_before(found: JournalState, since: Position) -> int | None:
    """Return the journal's last sequence number before `since`, or None if the store no longer determines it.

    Deletes remove the oldest events, so if any row before `since` exists, the last one does. The head lists the most
    recent appends.
    """
    head = found.head
    assert head is not None
    if not head.live and head.position < since:
        return None
    before = [seq_nr for seq_nr, row in found.rows.items() if row.position < since]
    before += [each.last for each in head.recent if head.incarnation <= each.position < since]
    if before:
        return max(before)
    if head.evicted is not None and head.evicted >= since:
        return None
    after = [each.first for each in head.recent if each.position >= since]
    return min(after) - 1 if after else head.seq_nr


def _state_before(found: JournalState, since: Position, last: int) -> JournalState:
    """Return the journal's state before `since`, as far as the store still holds it."""
    head = found.head
    assert head is not None
    before = {seq_nr: row for seq_nr, row in found.rows.items() if row.position < since}
    evicted = head.evicted if head.evicted is not None and head.evicted < since else None
    recent = tuple(each for each in head.recent if each.position < since)
    base = msgspec.structs.replace(
        head, live=True, seq_nr=last, delete_to=0, position=head.incarnation, recent=recent, evicted=evicted
    )
    return JournalState(base, before)


def differences(folded: FoldedJournal, found: JournalState) -> list[Difference]:
    """Return every difference of a journal; a missing grave is not one, because graves are removed after a time."""
    if not is_certain(folded, found):
        advice = "the log does not reach back far enough to determine it: restore the store from a backup"
        return [
            msgspec.structs.replace(each, expected=None, found=f"{each.found}; {advice}")
            for each in _damage_differences(folded, found)
        ]
    tags = () if folded.partial else _tag_differences(folded, found)
    return [
        *_damage_differences(folded, found),
        *_head_differences(folded, found),
        *_row_differences(folded, found),
        *tags,
    ]


def _damage_differences(folded: FoldedJournal, found: JournalState) -> Iterator[Difference]:
    for each in found.damaged:
        expected = None
        if each.what == "head" and folded.state.head is not None:
            expected = _show_head(folded.state.head)
        elif each.what == "event":
            expected = _show_row(folded.state.rows.get(each.seq_nr or 0))
        elif each.place is not None:
            expected = each.place.tag
        yield _difference(folded, f"{each.what} damaged", seq_nr=each.seq_nr, expected=expected, found=each.reason)


def is_certain(folded: FoldedJournal, found: JournalState) -> bool:
    """Return whether the fold is exact in spite of damaged rows, so that the journal can be repaired from it.

    Where the log begins later than the journal, the fold depends on the head and on the last row before the log's
    start. A damaged head, or a damaged row next to that boundary, leaves the sequence numbers uncertain.
    """
    if found.head_damaged:
        return folded.since == Position(FIRST_EPOCH, 0)
    head = found.head
    if not folded.partial or head is None or not found.damaged_rows:
        return True
    if any(head.incarnation <= each.position < folded.since for each in head.recent):
        return True
    before = [seq_nr for seq_nr, row in found.rows.items() if row.position < folded.since]
    after = [seq_nr for seq_nr, row in found.rows.items() if row.position >= folded.since]
    low, high = max(before, default=head.delete_to), min(after, default=LAST)
    return not any(low < number < high for number in found.damaged_rows)


def is_repairable(difference: Difference, folded: FoldedJournal, found: JournalState) -> bool:
    """Return whether a repair removes a difference; rows from before the log's start cannot be restored."""
    if difference.what == "tag damaged":
        return not folded.partial
    if difference.what != "event damaged" or not folded.partial or found.head is None:
        return True
    number = difference.seq_nr or 0
    return number in folded.state.rows or not found.head.delete_to < number <= found.head.seq_nr


def _head_differences(folded: FoldedJournal, found: JournalState) -> Iterator[Difference]:
    wanted, head = folded.state.head, found.head
    if wanted is None or not wanted.live:
        if head is not None and head.live:
            yield _difference(folded, "head extra", found=_show_head(head))
    elif found.head_damaged:
        return
    elif head is None or not head.live:
        yield _difference(folded, "head missing", expected=_show_head(wanted))
    elif folded.partial:
        if head.seq_nr != wanted.seq_nr:
            yield _difference(folded, "head differs", expected=f"seq_nr {wanted.seq_nr}", found=f"seq_nr {head.seq_nr}")
    elif _without_older_appends(head, folded.since) != _without_older_appends(wanted, folded.since):
        names = [name for name in Head.__struct_fields__ if getattr(head, name) != getattr(wanted, name)]
        yield _difference(folded, "head differs", expected=_show_head(wanted, names), found=_show_head(head, names))


def _without_older_appends(head: Head, since: Position) -> Head:
    """Return a head without its recent appends from before `since`, which the log no longer holds."""
    if since.offset == 0:
        return head
    recent = tuple(each for each in head.recent if each.position >= max(since, head.incarnation))
    return msgspec.structs.replace(head, recent=recent, evicted=None)


def _row_differences(folded: FoldedJournal, found: JournalState) -> Iterator[Difference]:
    wanted = folded.state.rows
    deleted_to = found.head.delete_to if folded.partial and found.head is not None else 0
    for seq_nr in sorted(wanted.keys() | found.rows.keys()):
        row, other = wanted.get(seq_nr), found.rows.get(seq_nr)
        if row is None:
            yield _difference(folded, "event extra", seq_nr=seq_nr, found=_show_row(other))
        elif other is None:
            if seq_nr > deleted_to and seq_nr not in found.damaged_rows:
                yield _difference(folded, "event missing", seq_nr=seq_nr, expected=_show_row(row))
        elif row != other and row.position >= folded.since:
            yield _difference(folded, "event differs", seq_nr=seq_nr, expected=_show_row(row), found=_show_row(other))


def _tag_differences(folded: FoldedJournal, found: JournalState) -> Iterator[Difference]:
    wanted = folded.state.tags
    for place in sorted(wanted.keys() | found.tags.keys()):
        row, other = wanted.get(place), found.tags.get(place)
        if row is None and other is not None:
            yield _difference(folded, "tag extra", seq_nr=other.seq_nr, found=place.tag)
        elif other is None and row is not None:
            if place not in found.damaged_tags:
                yield _difference(folded, "tag missing", seq_nr=row.seq_nr, expected=place.tag)
        elif row != other and row is not None:
            yield _difference(folded, "tag differs", seq_nr=row.seq_nr, expected=place.tag, found=place.tag)


def plan_repair(folded: FoldedJournal, found: JournalState, pointer: Pointer, config: TopicConfig, rev: int) -> Repair:
    """Return the repair that makes the stored journal equal to the folded one."""
    wanted = folded.state
    deleted_to = found.head.delete_to if folded.partial and found.head is not None else 0
    rows = [row for seq_nr, row in wanted.rows.items() if found.rows.get(seq_nr) != row and seq_nr > deleted_to]
    extra_tags: list[TagPosition] = []
    tags: list[TagRow] = []
    if not folded.partial:
        tags = [row for place, row in wanted.tags.items() if found.tags.get(place) != row]
        extra_tags = [place for place in (*found.tags, *found.damaged_tags) if place not in wanted.tags]
    extra_rows = [seq_nr for seq_nr in found.rows if seq_nr not in wanted.rows]
    damaged_rows = [
        each.seq_nr
        for each in _damage_differences(folded, found)
        if each.what == "event damaged" and each.seq_nr is not None and is_repairable(each, folded, found)
    ]
    extra_rows += [seq_nr for seq_nr in damaged_rows if seq_nr not in wanted.rows]
    head = _repaired_head(folded, found, pointer, config)
    return Repair(
        key=folded.key,
        partition=folded.partition,
        pointer=pointer,
        rev=rev,
        head=head,
        rows=tuple(rows),
        segments=tuple({event_segment(seq_nr, head.segment_size) for seq_nr in wanted.rows} if head.run_start else ()),
        tags=tuple(tags),
        extra_rows=tuple(extra_rows),
        extra_tags=tuple(extra_tags),
        damaged_rows=found.damaged_rows,
    )


def _repaired_head(folded: FoldedJournal, found: JournalState, pointer: Pointer, config: TopicConfig) -> Head:
    wanted, head = folded.state.head, found.head
    if wanted is None:
        # The log has no such journal: after a grave at the pointer the next append starts a new incarnation.
        at = pointer.position
        return Head(False, 0, 0, at, at, config.segment_size, None, 0, (), None, ())
    if folded.partial and head is not None:
        return msgspec.structs.replace(
            head, seq_nr=wanted.seq_nr, live=wanted.live, position=max(head.position, wanted.position)
        )
    return wanted


def _difference(
    folded: FoldedJournal,
    what: str,
    *,
    seq_nr: int | None = None,
    expected: str | None = None,
    found: str | None = None,
) -> Difference:
    return Difference(what, *folded.key, folded.partition, seq_nr, expected, found)


def _show_head(head: Head, names: Iterable[str] = ("seq_nr", "delete_to", "position")) -> str:
    return ", ".join(f"{name} {getattr(head, name)}" for name in names)


def _show_row(row: EventRow | None) -> str | None:
    return None if row is None else f"{len(row.encoded)} bytes at {row.position.epoch}:{row.position.offset}"
