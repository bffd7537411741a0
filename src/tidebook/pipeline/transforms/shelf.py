"""What the store must hold of one journal, by the log, and how that differs from what it does hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

import msgspec

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.mend import Mend
from tidebook.core.position import Position
from tidebook.core.replication import (
    ClearEvents,
    ClearJournal,
    EventRow,
    Placed,
    Pointer,
    PutEvents,
    PutHead,
    PutTags,
    TagPlace,
    TagRow,
    Write,
    plan_key,
)
from tidebook.core.topic import TopicFacts


class Shelf(msgspec.Struct):
    """All that a store holds of one journal."""

    head: Head | None = None
    rows: dict[int, EventRow] = msgspec.field(default_factory=dict)
    tags: dict[TagPlace, TagRow] = msgspec.field(default_factory=dict)

    def carry_out(self, writes: Iterable[Write]) -> None:
        """Do what a store does with the writes of a key."""
        for write in writes:
            match write:
                case PutEvents():
                    self.rows.update((row.seq_nr, row) for row in write.rows)
                case PutTags():
                    self.tags.update((row.place, row) for row in write.rows)
                case PutHead():
                    self.head = write.head
                case ClearEvents():
                    self._keep_above(write.head.delete_to, tags=write.clear_tags)
                case ClearJournal():
                    self.rows.clear()
                    if write.clear_tags:
                        self.tags.clear()
                case _:
                    assert_never(write)

    def _keep_above(self, number: int, *, tags: bool) -> None:
        self.rows = {seq_nr: row for seq_nr, row in self.rows.items() if seq_nr > number}
        if tags:
            self.tags = {place: row for place, row in self.tags.items() if row.seq_nr > number}


class Difference(msgspec.Struct, frozen=True):
    """One way in which the store is not what the log makes it."""

    #: `head`, `event` or `tag`, and `missing`, `extra` or `differs`.
    what: str
    topic: str
    id: str
    partition: int
    seq_nr: int | None = None
    expected: str | None = None
    found: str | None = None
    mended: bool = False


class Folded(msgspec.Struct, frozen=True):
    """A journal by the log, from a position on."""

    key: Key
    partition: int
    shelf: Shelf
    #: What lies before is the store's word alone, for the log no longer reaches back to it.
    since: Position
    partial: bool


def fold_journal(
    key: Key,
    partition: int,
    found: Shelf,
    placed: Iterable[Placed],
    facts: TopicFacts,
    since: Position,
    *,
    clear_tags: bool = True,
) -> Folded:
    """Fold a journal's records from `since` on: from nothing, or from what the store says of the time before."""
    head = found.head
    partial = head is not None and head.incarnation < since
    shelf = Shelf()
    if partial:
        last = _last_before(found, since)
        if last is None:  # nothing of it can be told from the records that are left
            return Folded(key, partition, found, since, True)
        shelf = _base(found, since, last)
    start = since
    if head is not None and not partial:
        # An earlier life that begins before the log does cannot be folded, and does not matter.
        start = max(since, head.incarnation) if since.offset > 0 else since
    work = [each for each in placed if each.position >= start]
    shelf.carry_out(plan_key(key, shelf.head, work, facts, partition=partition, clear_tags=clear_tags))
    return Folded(key, partition, shelf, since, partial)


def _last_before(found: Shelf, since: Position) -> int | None:
    """The number that the journal had reached before `since`, where the store still tells it.

    Deletes take the first events, so the last row before `since` is there if any is. The head remembers some appends.
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
    behind = [each.first for each in head.recent if each.position >= since]
    return min(behind) - 1 if behind else head.seq_nr


def _base(found: Shelf, since: Position, last: int) -> Shelf:
    """The journal before `since`, as far as the store still shows it."""
    head = found.head
    assert head is not None
    before = {seq_nr: row for seq_nr, row in found.rows.items() if row.position < since}
    evicted = head.evicted if head.evicted is not None and head.evicted < since else None
    recent = tuple(each for each in head.recent if each.position < since)
    base = msgspec.structs.replace(
        head, live=True, seq_nr=last, delete_to=0, position=head.incarnation, recent=recent, evicted=evicted
    )
    return Shelf(base, before)


def differences(folded: Folded, found: Shelf) -> list[Difference]:
    """Every way in which a journal differs; an absent grave is none, for graves may be removed."""
    return [*_heads(folded, found), *_rows(folded, found), *(() if folded.partial else _tags(folded, found))]


def _heads(folded: Folded, found: Shelf) -> Iterator[Difference]:
    wanted, head = folded.shelf.head, found.head
    if wanted is None or not wanted.live:
        if head is not None and head.live:
            yield _difference(folded, "head extra", found=_shown(head))
    elif head is None or not head.live:
        yield _difference(folded, "head missing", expected=_shown(wanted))
    elif folded.partial:
        if head.seq_nr != wanted.seq_nr:
            yield _difference(folded, "head differs", expected=f"seq_nr {wanted.seq_nr}", found=f"seq_nr {head.seq_nr}")
    elif _since(head, folded.since) != _since(wanted, folded.since):
        names = [name for name in Head.__struct_fields__ if getattr(head, name) != getattr(wanted, name)]
        yield _difference(folded, "head differs", expected=_shown(wanted, names), found=_shown(head, names))


def _since(head: Head, since: Position) -> Head:
    """A head without what it remembers of records that the log no longer has."""
    if since.offset == 0:
        return head
    recent = tuple(each for each in head.recent if each.position >= max(since, head.incarnation))
    return msgspec.structs.replace(head, recent=recent, evicted=None)


def _rows(folded: Folded, found: Shelf) -> Iterator[Difference]:
    wanted = folded.shelf.rows
    gone_to = found.head.delete_to if folded.partial and found.head is not None else 0
    for seq_nr in sorted(wanted.keys() | found.rows.keys()):
        row, other = wanted.get(seq_nr), found.rows.get(seq_nr)
        if row is None:
            yield _difference(folded, "event extra", seq_nr=seq_nr, found=_placed(other))
        elif other is None:
            if seq_nr > gone_to:
                yield _difference(folded, "event missing", seq_nr=seq_nr, expected=_placed(row))
        elif row != other and row.position >= folded.since:
            yield _difference(folded, "event differs", seq_nr=seq_nr, expected=_placed(row), found=_placed(other))


def _tags(folded: Folded, found: Shelf) -> Iterator[Difference]:
    wanted = folded.shelf.tags
    for place in sorted(wanted.keys() | found.tags.keys()):
        row, other = wanted.get(place), found.tags.get(place)
        if row is None and other is not None:
            yield _difference(folded, "tag extra", seq_nr=other.seq_nr, found=place.tag)
        elif other is None and row is not None:
            yield _difference(folded, "tag missing", seq_nr=row.seq_nr, expected=place.tag)
        elif row != other and row is not None:
            yield _difference(folded, "tag differs", seq_nr=row.seq_nr, expected=place.tag, found=place.tag)


def mend_of(folded: Folded, found: Shelf, pointer: Pointer, facts: TopicFacts, rev: int) -> Mend:
    """What puts the journal right."""
    wanted = folded.shelf
    gone_to = found.head.delete_to if folded.partial and found.head is not None else 0
    rows = [row for seq_nr, row in wanted.rows.items() if found.rows.get(seq_nr) != row and seq_nr > gone_to]
    extra_tags: list[TagPlace] = []
    tags: list[TagRow] = []
    if not folded.partial:
        tags = [row for place, row in wanted.tags.items() if found.tags.get(place) != row]
        extra_tags = [place for place in found.tags if place not in wanted.tags]
    return Mend(
        key=folded.key,
        partition=folded.partition,
        pointer=pointer,
        rev=rev,
        head=_head_to_keep(folded, found, pointer, facts),
        rows=tuple(rows),
        tags=tuple(tags),
        extra_rows=tuple(seq_nr for seq_nr in found.rows if seq_nr not in wanted.rows),
        extra_tags=tuple(extra_tags),
    )


def _head_to_keep(folded: Folded, found: Shelf, pointer: Pointer, facts: TopicFacts) -> Head:
    wanted, head = folded.shelf.head, found.head
    if wanted is None:
        # The log knows of no journal: a grave at the pointer lets the next append begin one.
        at = pointer.position
        return Head(False, 0, 0, at, at, facts.segment_size, None, 0, (), None, ())
    if folded.partial and head is not None:
        return msgspec.structs.replace(
            head, seq_nr=wanted.seq_nr, live=wanted.live, position=max(head.position, wanted.position)
        )
    return wanted


def _difference(
    folded: Folded, what: str, *, seq_nr: int | None = None, expected: str | None = None, found: str | None = None
) -> Difference:
    return Difference(what, *folded.key, folded.partition, seq_nr, expected, found)


def _shown(head: Head, names: Iterable[str] = ("seq_nr", "delete_to", "position")) -> str:
    return ", ".join(f"{name} {getattr(head, name)}" for name in names)


def _placed(row: EventRow | None) -> str | None:
    return None if row is None else f"{len(row.kept)} bytes at {row.position.epoch}:{row.position.offset}"
