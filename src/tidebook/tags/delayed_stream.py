"""Streams with `consistency="delay"`: they stay a fixed delay behind the clock and search for late events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tidebook.core.errors import MissingTaggedEvent
from tidebook.core.replication_plan import TagPosition, TagRow
from tidebook.runtime.clock import Clock
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.tags.bucket_size import read_buckets
from tidebook.tags.gap_search import Gap, JournalIncarnation, incarnation_of, search_gap
from tidebook.tags.offset import encode_offset
from tidebook.tags.settings import TagSettings

SEARCH_PAUSE_S = 0.05
#: How many journals a query remembers before it evicts those without an event in the last two buckets.
JOURNALS_MAX = 200_000


class DelayedStream:
    """One query with `consistency="delay"`."""

    def __init__(
        self,
        tag: str,
        position: TagPosition | None,
        from_ms: int,
        *,
        begins: bool,
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
        self._from_beginning = begins
        self._topics = topics
        self._store = store
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        #: By journal: the last tag number delivered, and its position.
        self._last: dict[JournalIncarnation, tuple[int, TagPosition]] = {}
        self._backtracked_ms = clock.now_ms()

    async def scan(self) -> None:
        """For a start within the current bucket, learn the last tag numbers of the journals before the start."""
        buckets = await read_buckets(self._store)
        bucket_ms = buckets.start(self._from_ms)
        if self._from_beginning or bucket_ms != buckets.start(self._clock.now_ms()):
            return
        async for row in self._rows(None, bucket_ms, self._from_ms + 1):
            if self._is_before_start(row.place) and self._is_wanted(row):
                self._last[incarnation_of(row)] = (row.tag_seq_nr, row.place)

    async def read_new(self) -> AsyncIterator[TagRow]:
        """Yield the new events up to the delay and, when due, those that arrived late."""
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
        """Yield events that arrived late, of journals without a later event."""
        if self._position is None:
            return
        self._metrics.count("tags_back_tracks", tag=self._tag)
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
            last = self._last.get(incarnation_of(row))
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
        """Yield the row after the missing ones of its journal; nothing if it was delivered before."""
        if self._is_before_start(row.place):
            return
        journal = incarnation_of(row)
        last = self._last.get(journal)
        if last is not None and row.tag_seq_nr <= last[0]:
            return
        first = 1 if last is None else last[0] + 1
        if row.tag_seq_nr > first:
            gap = Gap(row, first, self._start, self._start_ms, None if last is None else last[1])
            for missed in await self._fill(gap, seen=last is not None):
                self._last[journal] = (missed.tag_seq_nr, missed.place)
                yield missed
        self._last[journal] = (row.tag_seq_nr, row.place)
        yield row

    async def _fill(self, gap: Gap, *, seen: bool) -> tuple[TagRow, ...]:
        """Return the rows of a gap, searching up to the timeout in the settings.

        After the timeout a journal that was not seen before is taken as it is; otherwise `MissingTaggedEvent` is
        raised.
        """
        known = seen or self._from_beginning
        timeout_s = self._settings.missing_timeout_s if known else self._settings.new_persistence_id_scan_timeout_s
        deadline_ms = self._clock.now_ms() + timeout_s * 1000
        since = -1
        while True:
            found = await search_gap(self._store, gap, seen=seen, keeps_deleted=self._settings.deletes == "keep")
            if found.complete or (not known and self._clock.now_ms() >= deadline_ms):
                if found.rows:
                    self._metrics.count("tags_gaps_found", tag=self._tag)
                return found.rows
            if self._clock.now_ms() >= deadline_ms:
                self._metrics.count("tags_events_missing", tag=self._tag)
                raise self._missing(gap)
            since = await self._store.wait_any(timeout_s=SEARCH_PAUSE_S, since=since)

    def _missing(self, gap: Gap) -> MissingTaggedEvent:
        journal = gap.journal
        last = self._last.get(journal)
        position = self._start if last is None else last[1]
        return MissingTaggedEvent(
            tag=self._tag,
            topic=journal.topic,
            id=journal.id,
            missing=(gap.first, gap.row.tag_seq_nr - 1),
            last_known_offset=None if position is None else encode_offset(position),
        )

    def _is_wanted(self, row: TagRow) -> bool:
        return self._topics is None or row.topic in self._topics

    def _is_before_start(self, position: TagPosition) -> bool:
        return position.time_ms < self._start_ms or (self._start is not None and position <= self._start)

    async def _evict_journals(self) -> None:
        """Bound the memory: evict journals without an event in the last two buckets.

        The stream no longer searches for events before these buckets then.
        """
        if len(self._last) <= JOURNALS_MAX or self._position is None:
            return
        evict_before_ms = (await read_buckets(self._store)).before(self._position.time_ms)
        self._last = {journal: last for journal, last in self._last.items() if last[1].time_ms >= evict_before_ms}
        self._start_ms = max(self._start_ms, evict_before_ms)
        self._from_beginning = False
