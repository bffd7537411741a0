"""Events that a stream by tag lacks: looked for in the tag view, then, however old they are, in their journal."""

from __future__ import annotations

from collections import deque

import msgspec

from tidebook.core.event import event_tags
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, TagPlace, TagRow, tag_row
from tidebook.store.port import StoreWriter
from tidebook.tags.sizes import read_buckets

PAGE_EVENTS = 1000
#: How near to the first event that may be missing a journal is read from.
NEAR_EVENTS = 50


class Life(msgspec.Struct, frozen=True, gc=False):
    """One life of a journal: its numbers by tag begin at 1."""

    topic: str
    id: str
    incarnation: Position


class Gap(msgspec.Struct, frozen=True):
    """Numbers that a stream has not seen, of the journal of `row`, which is held back for them."""

    row: TagRow
    #: The least number that may be missing; the greatest is the one before the row's own.
    first: int
    #: What lies here or before belongs to others: the stream began behind it.
    floor: TagPlace | None
    floor_ms: int
    #: Where the last one that it delivered of this journal stood.
    last: TagPlace | None = None

    @property
    def life(self) -> Life:
        return life_of(self.row)

    def wants(self, row: TagRow) -> bool:
        """Whether a row is one of those that are missing."""
        return self.first <= row.tag_seq_nr < self.row.tag_seq_nr and not self.is_before(row.place)

    def is_before(self, place: TagPlace) -> bool:
        """Whether a place lies before the stream's beginning."""
        return place.time_ms < self.floor_ms or (self.floor is not None and place <= self.floor)

    def is_known(self, event: EventRow) -> bool:
        """Whether an event of its journal lies before the beginning, or not behind the last one delivered."""
        at, row = event.position, self.row
        place = TagPlace(row.tag, event.time_ms, row.topic, row.partition, at.offset, event.index, at.epoch)
        return self.is_before(place) or (self.last is not None and place <= self.last)


class Found(msgspec.Struct, frozen=True):
    """What a search came to: `complete` says that no other event is missing."""

    rows: tuple[TagRow, ...]
    complete: bool


def life_of(row: TagRow) -> Life:
    """The life of a journal that a row's number counts in."""
    return Life(row.topic, row.id, row.incarnation)


async def search(store: StoreWriter, gap: Gap, *, seen: bool, kept: bool) -> Found:
    """Look in the current and the previous bucket, then in the journal itself, however old the event is.

    A journal that the stream has not `seen` before is asked first: a stream that begins in the middle meets all of its
    journals so, and would read two buckets for each. `kept` says that rows of deleted events stay in the view.
    """
    missing = gap.row.tag_seq_nr - gap.first
    found = await _in_view(store, gap) if seen else []
    if len(found) == missing:
        return Found(tuple(found), True)
    in_journal = await _in_journal(store, gap)
    if in_journal is None:
        return Found(tuple(found if seen else await _in_view(store, gap)), False)
    by_number = {row.tag_seq_nr: row for row in in_journal.rows}
    if not in_journal.complete and len(by_number) < missing and (seen or kept):
        # The journal has come further than the row, so all rows before it are in the view by now: also those whose
        # events were deleted since, where deletes leave them there.
        by_number |= {row.tag_seq_nr: row for row in await _in_view(store, gap)}
    rows = (by_number[number] for number in sorted(by_number))
    return Found(tuple(row for row in rows if gap.wants(row)), True)


async def _in_view(store: StoreWriter, gap: Gap) -> list[TagRow]:
    at = gap.row.place
    from_ms = max((await read_buckets(store)).before(at.time_ms), gap.floor_ms)
    found: list[TagRow] = []
    place: TagPlace | None = None
    while rows := await store.tag_rows(
        at.tag, after=place, from_ms=from_ms, until_ms=at.time_ms + 1, limit=PAGE_EVENTS
    ):
        found += (row for row in rows if life_of(row) == gap.life and gap.wants(row))
        place = rows[-1].place
    return found


async def _in_journal(store: StoreWriter, gap: Gap) -> Found | None:
    """Its events that the stream may lack; `complete` where the view has no more. None: it is behind, or moved.

    What it has no more was deleted. Deletes take events from the front, so those that remain are numbered from the
    held row backwards; and where one is left that the stream knows of, none behind it was deleted.
    """
    life, tag = gap.life, gap.row.tag
    key = Key(life.topic, life.id)
    head = await store.head(key)
    if head is None or head.incarnation < life.incarnation:
        return None
    if head.incarnation > life.incarnation or not head.live:
        return Found((), False)  # this life was purged
    if head.tag_counts.get(tag, 0) < gap.row.tag_seq_nr:
        return None
    tagged: deque[EventRow] = deque(maxlen=gap.row.tag_seq_nr - gap.first)
    after = await _known_through(store, key, head, gap)
    whole = after > head.delete_to
    while rows := await store.events(key, head, after=after, to=gap.row.seq_nr - 1, limit=PAGE_EVENTS):
        lacking = [row for row in rows if not gap.is_known(row)]
        whole = whole or len(lacking) < len(rows)
        tagged += (row for row in lacking if tag in event_tags(row.kept))
        after = rows[-1].seq_nr
    now = await store.head(key)
    if now is None or (now.live, now.incarnation, now.delete_to) != (True, head.incarnation, head.delete_to):
        # A head tells of a delete or a purge before rows go: what was read may have a hole, or be another life's.
        return None
    first = gap.row.tag_seq_nr - len(tagged)
    made = (tag_row(tag, key, gap.row.partition, life.incarnation, first + n, event) for n, event in enumerate(tagged))
    return Found(tuple(made), whole)


async def _known_through(store: StoreWriter, key: Key, head: Head, gap: Gap) -> int:
    """A number up to which the stream knows of all events, and few before the first that it may lack.

    Places grow with numbers, so it is bisected: a stream that begins at the end of long journals does not read them.
    """
    low, high = head.delete_to, gap.row.seq_nr - 1
    middle = high - NEAR_EVENTS
    while high - low > NEAR_EVENTS:
        found = await store.events(key, head, after=middle, to=high, limit=1)
        if found and gap.is_known(found[0]):
            low = found[0].seq_nr
        else:
            high = middle
        middle = (low + high) // 2
    return low
