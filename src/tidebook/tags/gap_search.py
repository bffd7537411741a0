"""Search for events that a stream by tag lacks: in the tag view, then, however old they are, in their journal."""

from __future__ import annotations

from collections import deque

import msgspec

from tidebook.core.event import event_tags
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, TagPosition, TagRow, tag_row
from tidebook.store.port import StoreWriter
from tidebook.tags.bucket_size import read_buckets

PAGE_EVENTS = 1000
#: At most this many known events are read before the first one that may be missing.
NEAR_EVENTS = 50


class JournalIncarnation(msgspec.Struct, frozen=True, gc=False):
    """One incarnation of a journal: its tag numbers start at 1."""

    topic: str
    id: str
    incarnation: Position


class Gap(msgspec.Struct, frozen=True):
    """Tag numbers that a stream lacks of one journal; `row`, a later event of the journal, is held back meanwhile."""

    row: TagRow
    #: The first number that may be missing; the last is the one before the row's.
    first: int
    #: The stream starts after this position and at this time: earlier rows are not part of it.
    start: TagPosition | None
    start_ms: int
    #: The position of the last event of this journal that was delivered.
    last: TagPosition | None = None

    @property
    def journal(self) -> JournalIncarnation:
        return incarnation_of(self.row)

    def wants(self, row: TagRow) -> bool:
        """Return whether a row is one of the missing ones."""
        return self.first <= row.tag_seq_nr < self.row.tag_seq_nr and not self.is_before(row.place)

    def is_before(self, position: TagPosition) -> bool:
        """Return whether a position is before the start of the stream."""
        return position.time_ms < self.start_ms or (self.start is not None and position <= self.start)

    def is_known(self, event: EventRow) -> bool:
        """Return whether an event of the journal is before the start, or not after the last one delivered."""
        at, row = event.position, self.row
        position = TagPosition(row.tag, event.time_ms, row.topic, row.partition, at.offset, event.index, at.epoch)
        return self.is_before(position) or (self.last is not None and position <= self.last)


class GapSearchResult(msgspec.Struct, frozen=True):
    """The rows found; `complete` means that no other event is missing."""

    rows: tuple[TagRow, ...]
    complete: bool


def incarnation_of(row: TagRow) -> JournalIncarnation:
    """Return the journal incarnation that a row's tag number counts in."""
    return JournalIncarnation(row.topic, row.id, row.incarnation)


async def search_gap(store: StoreWriter, gap: Gap, *, seen: bool, keeps_deleted: bool) -> GapSearchResult:
    """Search the current and the previous bucket, then the journal itself, however old the event is.

    For a journal that the stream has not `seen` before the order is reversed: a stream that starts in the middle meets
    every journal that way, and would read two buckets for each. `keeps_deleted` means that the rows of deleted events
    stay in the view.
    """
    missing = gap.row.tag_seq_nr - gap.first
    found = await _in_view(store, gap) if seen else []
    if len(found) == missing:
        return GapSearchResult(tuple(found), True)
    in_journal = await _in_journal(store, gap)
    if in_journal is None:
        return GapSearchResult(tuple(found if seen else await _in_view(store, gap)), False)
    by_number = {row.tag_seq_nr: row for row in in_journal.rows}
    if not in_journal.complete and len(by_number) < missing and (seen or keeps_deleted):
        # The journal's head is after the row, so the view has all rows before it by now, including those of events
        # deleted since if deletes keep them.
        by_number |= {row.tag_seq_nr: row for row in await _in_view(store, gap)}
    rows = (by_number[number] for number in sorted(by_number))
    return GapSearchResult(tuple(row for row in rows if gap.wants(row)), True)


async def _in_view(store: StoreWriter, gap: Gap) -> list[TagRow]:
    at = gap.row.place
    from_ms = max((await read_buckets(store)).before(at.time_ms), gap.start_ms)
    found: list[TagRow] = []
    position: TagPosition | None = None
    while rows := await store.tag_rows(
        at.tag, after=position, from_ms=from_ms, until_ms=at.time_ms + 1, limit=PAGE_EVENTS
    ):
        found += (row for row in rows if incarnation_of(row) == gap.journal and gap.wants(row))
        position = rows[-1].place
    return found


async def _in_journal(store: StoreWriter, gap: Gap) -> GapSearchResult | None:
    """Return the journal's events that the stream may lack; `complete` means that the view has no others.

    Return None if the journal is not replicated up to the row yet, or changed during the search. Events that are
    missing in the journal were deleted. Deletes remove events from the front, so the remaining ones are numbered
    backwards from the row; and if one of them is known to the stream, none after it was deleted.
    """
    journal, tag = gap.journal, gap.row.tag
    key = Key(journal.topic, journal.id)
    head = await store.head(key)
    if head is None or head.incarnation < journal.incarnation:
        return None
    if head.incarnation > journal.incarnation or not head.live:
        return GapSearchResult((), False)  # this incarnation was purged
    if head.tag_counts.get(tag, 0) < gap.row.tag_seq_nr:
        return None
    tagged: deque[EventRow] = deque(maxlen=gap.row.tag_seq_nr - gap.first)
    after = await _known_through(store, key, head, gap)
    complete = after > head.delete_to
    while rows := await store.events(key, head, after=after, to=gap.row.seq_nr - 1, limit=PAGE_EVENTS):
        unknown = [row for row in rows if not gap.is_known(row)]
        complete = complete or len(unknown) < len(rows)
        tagged += (row for row in unknown if tag in event_tags(row.kept))
        after = rows[-1].seq_nr
    now = await store.head(key)
    if now is None or (now.live, now.incarnation, now.delete_to) != (True, head.incarnation, head.delete_to):
        # The head of a delete or purge is written before rows are cleared: what was read may have a hole, or belong to
        # another incarnation.
        return None
    first = gap.row.tag_seq_nr - len(tagged)
    rows_found = (
        tag_row(tag, key, gap.row.partition, journal.incarnation, first + n, event) for n, event in enumerate(tagged)
    )
    return GapSearchResult(tuple(rows_found), complete)


async def _known_through(store: StoreWriter, key: Key, head: Head, gap: Gap) -> int:
    """Return a number through which the stream knows all events, and few before the first that it may lack.

    Positions grow with numbers, so the journal is bisected: a stream that starts at the end of long journals does not
    read them.
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
