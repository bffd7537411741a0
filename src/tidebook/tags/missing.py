"""Events that a stream by tag lacks: looked for in the tag view, then, however old they are, in their journal."""

from __future__ import annotations

import msgspec

from tidebook.core.event import event_tags
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, TagPlace, TagRow, tag_row
from tidebook.store.port import StoreWriter
from tidebook.tags.sizes import read_buckets

PAGE_EVENTS = 1000


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

    @property
    def life(self) -> Life:
        return life_of(self.row)

    def wants(self, row: TagRow) -> bool:
        """Whether a row is one of those that are missing."""
        return self.first <= row.tag_seq_nr < self.row.tag_seq_nr and not self.is_before(row.place)

    def is_before(self, place: TagPlace) -> bool:
        """Whether a place lies before the stream's beginning."""
        return place.time_ms < self.floor_ms or (self.floor is not None and place <= self.floor)


class Found(msgspec.Struct, frozen=True):
    """What a search came to: `complete` says that no other event is missing."""

    rows: tuple[TagRow, ...]
    complete: bool


def life_of(row: TagRow) -> Life:
    """The life of a journal that a row's number counts in."""
    return Life(row.topic, row.id, row.incarnation)


async def search(store: StoreWriter, gap: Gap) -> Found:
    """Look in the current and the previous bucket, then in the journal itself, however old the event is."""
    found = await _in_view(store, gap)
    if len(found) == gap.row.tag_seq_nr - gap.first:
        return Found(tuple(found), True)
    in_journal = await _in_journal(store, gap)
    if in_journal is None:
        return Found(tuple(found), False)
    # The journal has come further than the row, so all rows before it are in the view by now: also those whose
    # events were deleted since, where deletes leave them there.
    by_number = {row.tag_seq_nr: row for row in [*in_journal, *await _in_view(store, gap)]}
    return Found(tuple(by_number[number] for number in sorted(by_number)), True)


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


async def _in_journal(store: StoreWriter, gap: Gap) -> list[TagRow] | None:
    """The missing ones by the journal; those it has no more were deleted. None: it is behind the tag view, or moved.

    Deletes take events from the front, so those that remain are numbered from the end.
    """
    life, tag = gap.life, gap.row.tag
    key = Key(life.topic, life.id)
    head = await store.head(key)
    if head is None or head.incarnation < life.incarnation:
        return None
    if head.incarnation > life.incarnation or not head.live:
        return []  # this life was purged
    count = head.tag_counts.get(tag, 0)
    if count < gap.row.tag_seq_nr:
        return None
    tagged: list[EventRow] = []
    after = head.delete_to
    while rows := await store.events(key, head, after=after, to=head.seq_nr, limit=PAGE_EVENTS):
        tagged += (row for row in rows if tag in event_tags(row.kept))
        after = rows[-1].seq_nr
    now = await store.head(key)
    if now is None or (now.live, now.incarnation, now.delete_to) != (True, head.incarnation, head.delete_to):
        # A head tells of a delete or a purge before rows go: what was read may have a hole, or be another life's.
        return None
    first = count - len(tagged) + 1
    made = (tag_row(tag, key, gap.row.partition, life.incarnation, first + n, event) for n, event in enumerate(tagged))
    return [row for row in made if gap.wants(row)]
