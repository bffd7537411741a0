"""Streams with `consistency="delay"`: they stay a fixed delay behind the clock and search for late events.

A missing event is searched for in the tag view, then, however old it is, in its journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec

from tidebook.core.buckets import BUCKETS_SETTING, Buckets, decode_buckets
from tidebook.core.errors import MissingTaggedEvent
from tidebook.core.event import event_tags
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, TagPosition, TagRow, tag_row
from tidebook.runtime.clock import Clock
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.tags.event import encode_offset
from tidebook.tags.settings import TagSettings

SEARCH_PAUSE_S = 0.05
#: How many journals a query remembers before it evicts those without an event in the last two buckets.
JOURNALS_MAX = 200_000
PAGE_EVENTS = 1000
#: At most this many known events are read before the first one that may be missing.
NEAR_EVENTS = 50

#: One incarnation of a journal, within which tag numbers start at 1: its topic, id and incarnation.
JournalIncarnation = tuple[str, str, Position]


async def read_buckets(store: StoreWriter) -> Buckets:
    """Return the history of bucket sizes."""
    text = await store.setting(BUCKETS_SETTING)
    return Buckets() if text is None else decode_buckets(text)


class Gap(msgspec.Struct, frozen=True):
    """Tag numbers of one journal that a stream has not found; it holds back `row`, a later event of the journal."""

    row: TagRow
    #: The first number that may be missing; the last is the one before the row's.
    first: int
    #: The position of the last event of this journal that was delivered; None if the stream has not seen the journal.
    last: TagPosition | None

    @property
    def journal(self) -> JournalIncarnation:
        """The incarnation in which the numbers count."""
        return _incarnation_of(self.row)


class DelayedStream:
    """One query with `consistency="delay"`."""

    def __init__(
        self,
        tag: str,
        position: TagPosition | None,
        from_ms: int,
        *,
        from_beginning: bool,
        topics: frozenset[str] | None,
        store: StoreWriter,
        clock: Clock,
        settings: TagSettings,
        metrics: Metrics,
    ) -> None:
        self._tag = tag
        self._position = self._start = position
        self._from_ms = self._start_ms = from_ms
        #: Whether the stream starts at the beginning, so that each journal's first tag number is 1.
        self._from_beginning = from_beginning
        self._topics = topics
        self._store = store
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        #: The last tag number delivered of each journal, and its position.
        self._last: dict[JournalIncarnation, tuple[int, TagPosition]] = {}
        self._backtracked_ms = clock.now_ms()

    async def scan(self) -> None:
        """For a start within the current bucket, read the last tag number of each journal before the start."""
        buckets = await read_buckets(self._store)
        bucket_ms = buckets.start(self._from_ms)
        if self._from_beginning or bucket_ms != buckets.start(self._clock.now_ms()):
            return
        async for row in self._rows(None, bucket_ms, self._from_ms + 1):
            if self._is_before_start(row.place) and self._is_wanted(row):
                self._last[_incarnation_of(row)] = (row.tag_seq_nr, row.place)

    async def read_new(self) -> AsyncIterator[TagRow]:
        """Yield the new events that are older than the delay and, when a backtrack is due, those that arrived late."""
        until_ms = self._clock.now_ms() - int(self._settings.delay_s * 1000)
        read = 0
        async for row in self._rows(self._position, self._from_ms, until_ms):
            if self._is_wanted(row):
                async for each in self._with_missing(row):
                    yield each
            self._position = row.place
            read += 1
            if not read % self._settings.page_events:
                await self._evict_journals()
        interval_ms = self._settings.back_track_interval_s * 1000
        if self._position is not None and self._clock.now_ms() - self._backtracked_ms >= interval_ms:
            self._backtracked_ms = self._clock.now_ms()
            async for each in self.backtrack():
                yield each
            await self._evict_journals()

    async def backtrack(self) -> AsyncIterator[TagRow]:
        """Yield late events of journals that have no later event, which would have revealed a gap."""
        if self._position is None:
            return
        self._metrics.count("tags_backtracks", tag=self._tag)
        period_s = self._settings.back_track_period_s
        if isinstance(period_s, str):
            from_ms = (await read_buckets(self._store)).before(self._position.time_ms)
        else:
            from_ms = self._position.time_ms - int(period_s * 1000)
        async for row in self._rows(None, max(from_ms, self._start_ms), self._position.time_ms + 1):
            if row.place > self._position:
                return
            if not self._is_wanted(row):
                continue
            last = self._last.get(_incarnation_of(row))
            if last is None or row.tag_seq_nr > last[0]:
                async for each in self._with_missing(row):
                    self._metrics.count("tags_delayed_found", tag=self._tag)
                    yield each

    async def _rows(self, position: TagPosition | None, from_ms: int, until_ms: int) -> AsyncIterator[TagRow]:
        while rows := await self._store.tag_rows(
            self._tag, after=position, from_ms=from_ms, until_ms=until_ms, limit=self._settings.page_events
        ):
            for row in rows:
                yield row
            position = rows[-1].place

    async def _with_missing(self, row: TagRow) -> AsyncIterator[TagRow]:
        """Yield the missing rows of the row's journal, then the row itself; nothing if it was delivered before."""
        if self._is_before_start(row.place):
            return
        journal = _incarnation_of(row)
        number, position = self._last.get(journal, (0, None))
        if row.tag_seq_nr <= number:
            return
        if row.tag_seq_nr > number + 1:
            for missed in await self._fill(Gap(row, number + 1, position)):
                self._last[journal] = (missed.tag_seq_nr, missed.place)
                yield missed
        self._last[journal] = (row.tag_seq_nr, row.place)
        yield row

    async def _fill(self, gap: Gap) -> Sequence[TagRow]:
        """Return the rows of a gap, or raise after the timeout.

        A stream that does not start at the beginning accepts a gap before the first event that it sees of a journal.
        """
        known = gap.last is not None or self._from_beginning
        timeout_s = self._settings.missing_timeout_s if known else self._settings.new_persistence_id_scan_timeout_s
        deadline_ms = self._clock.now_ms() + timeout_s * 1000
        since = -1
        while True:
            rows, is_complete = await self._search(gap)
            is_late = self._clock.now_ms() >= deadline_ms
            if is_complete or (is_late and not known):
                if rows:
                    self._metrics.count("tags_gaps_found", tag=self._tag)
                return rows
            if is_late:
                self._metrics.count("tags_events_missing", tag=self._tag)
                position = gap.last or self._start
                raise MissingTaggedEvent(
                    tag=self._tag,
                    topic=gap.row.topic,
                    id=gap.row.id,
                    missing=(gap.first, gap.row.tag_seq_nr - 1),
                    last_known_offset=None if position is None else encode_offset(position),
                )
            since = await self._store.wait_any(timeout_s=SEARCH_PAUSE_S, since=since)

    async def _search(self, gap: Gap) -> tuple[Sequence[TagRow], bool]:
        """Return the missing rows found, and whether no other event is missing.

        Search the current and the previous bucket, then the journal. For a journal that the stream has not seen before
        the order is reversed: a stream that starts in the middle encounters every journal that way, and would read two
        buckets for each.
        """
        missing, seen = gap.row.tag_seq_nr - gap.first, gap.last is not None
        found = await self._in_view(gap) if seen else []
        if len(found) == missing:
            return found, True
        in_journal = await self._in_journal(gap)
        if in_journal is None:
            return found if seen else await self._in_view(gap), False
        rows, has_all = in_journal
        by_number = {row.tag_seq_nr: row for row in rows}
        if not has_all and len(by_number) < missing and (seen or self._settings.deletes == "keep"):
            # The journal's head is after the row, so the view has all rows before it by now, including those of events
            # deleted since if deletes keep them.
            by_number |= {row.tag_seq_nr: row for row in await self._in_view(gap)}
        return [row for _, row in sorted(by_number.items()) if self._is_missing(row, gap)], True

    async def _in_view(self, gap: Gap) -> list[TagRow]:
        time_ms = gap.row.time_ms
        from_ms = max((await read_buckets(self._store)).before(time_ms), self._start_ms)
        rows = self._rows(None, from_ms, time_ms + 1)
        return [row async for row in rows if _incarnation_of(row) == gap.journal and self._is_missing(row, gap)]

    async def _in_journal(self, gap: Gap) -> tuple[list[TagRow], bool] | None:
        """Return the journal's events that the stream may lack, and whether none of these can have been deleted.

        Return None if the journal is not replicated up to the row yet, or changed during the search. Events that are
        missing in the journal were deleted. Deletes remove events from the front, so the remaining ones are numbered
        backwards from the row; and if one of them is known to the stream, none after it was deleted.
        """
        row, tag = gap.row, self._tag
        key = Key(row.topic, row.id)
        head = await self._store.head(key)
        if head is None or head.incarnation < row.incarnation:
            return None
        if head.incarnation > row.incarnation or not head.live:
            return [], False  # this incarnation was purged
        if head.tag_counts.get(tag, 0) < row.tag_seq_nr:
            return None
        tagged: deque[EventRow] = deque(maxlen=row.tag_seq_nr - gap.first)
        after = await self._known_through(key, head, gap)
        has_all = after > head.delete_to
        while page := await self._store.events(key, head, after=after, to=row.seq_nr - 1, limit=PAGE_EVENTS):
            unknown = [event for event in page if not self._is_known(event, gap)]
            has_all = has_all or len(unknown) < len(page)
            tagged += (event for event in unknown if tag in event_tags(event.encoded))
            after = page[-1].seq_nr
        now = await self._store.head(key)
        if now is None or (now.live, now.incarnation, now.delete_to) != (True, head.incarnation, head.delete_to):
            # The head of a delete or purge is written before rows are cleared: the rows read may have a hole, or
            # belong to another incarnation.
            return None
        numbered = enumerate(tagged, row.tag_seq_nr - len(tagged))
        return [tag_row(tag, key, row.partition, row.incarnation, number, event) for number, event in numbered], has_all

    async def _known_through(self, key: Key, head: Head, gap: Gap) -> int:
        """Return a number through which the stream knows all events, with at most NEAR_EVENTS known ones after it.

        Positions grow with numbers, so bisection finds it without reading a long journal.
        """
        low, high = head.delete_to, gap.row.seq_nr - 1
        middle = high - NEAR_EVENTS
        while high - low > NEAR_EVENTS:
            found = await self._store.events(key, head, after=middle, to=high, limit=1)
            if found and self._is_known(found[0], gap):
                low = found[0].seq_nr
            else:
                high = middle
            middle = (low + high) // 2
        return low

    def _is_missing(self, row: TagRow, gap: Gap) -> bool:
        return gap.first <= row.tag_seq_nr < gap.row.tag_seq_nr and not self._is_before_start(row.place)

    def _is_known(self, event: EventRow, gap: Gap) -> bool:
        """Return whether an event of the journal is before the start, or not after the last one delivered."""
        at, row = event.position, gap.row
        position = TagPosition(row.tag, event.time_ms, row.topic, row.partition, at.offset, event.index, at.epoch)
        return self._is_before_start(position) or (gap.last is not None and position <= gap.last)

    def _is_wanted(self, row: TagRow) -> bool:
        return self._topics is None or row.topic in self._topics

    def _is_before_start(self, position: TagPosition) -> bool:
        return position.time_ms < self._start_ms or (self._start is not None and position <= self._start)

    async def _evict_journals(self) -> None:
        """Evict journals without an event in the last two buckets, and stop searching before these buckets."""
        if len(self._last) <= JOURNALS_MAX or self._position is None:
            return
        evict_before_ms = (await read_buckets(self._store)).before(self._position.time_ms)
        self._last = {journal: last for journal, last in self._last.items() if last[1].time_ms >= evict_before_ms}
        self._start_ms = max(self._start_ms, evict_before_ms)
        self._from_beginning = False


def _incarnation_of(row: TagRow) -> JournalIncarnation:
    return row.topic, row.id, row.incarnation
