"""Streams that stay behind the clock by a guessed delay, and search for what came later than that."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tidebook.core.clock import Clock
from tidebook.core.errors import MissingTaggedEvent
from tidebook.core.metrics import Metrics
from tidebook.core.replication import TagPlace, TagRow
from tidebook.store.port import StoreWriter
from tidebook.tags.missing import Gap, Life, life_of, search
from tidebook.tags.offset import encode_offset
from tidebook.tags.settings import TagSettings
from tidebook.tags.sizes import read_buckets

SEARCH_AGAIN_S = 0.05
#: How many journals a query remembers before it forgets those without an event in the last two buckets.
JOURNALS_MAX = 200_000


class DelayedStream:
    """One query with consistency = "delay"."""

    def __init__(
        self,
        tag: str,
        place: TagPlace | None,
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
        self._place = self._floor = place
        self._from_ms = self._floor_ms = from_ms
        #: Whether it begins at the very beginning, so that every journal's first number is 1.
        self._begins = begins
        self._topics = topics
        self._store = store
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        #: By journal: the last number delivered, and where it stood.
        self._last: dict[Life, tuple[int, TagPlace]] = {}
        self._looked_back_ms = clock.now_ms()

    async def scan(self) -> None:
        """Where it begins in the current bucket: learn which numbers its journals had before."""
        buckets = await read_buckets(self._store)
        bucket_ms = buckets.start(self._from_ms)
        if self._begins or bucket_ms != buckets.start(self._clock.now_ms()):
            return
        async for row in self._rows(None, bucket_ms, self._from_ms + 1):
            if self._is_before(row.place) and self._is_wanted(row):
                self._last[life_of(row)] = (row.tag_seq_nr, row.place)

    async def news(self) -> AsyncIterator[TagRow]:
        """What is there now, up to the delay; and when it is time, what came late."""
        until_ms = self._clock.now_ms() - int(self._settings.delay_s * 1000)
        read = 0
        async for row in self._rows(self._place, self._from_ms, until_ms):
            if self._is_wanted(row):
                async for each in self._checked(row):
                    yield each
            self._place = row.place
            read += 1
            if not read % self._settings.page_events:
                await self._forget()
        interval_ms = self._settings.back_track_interval_s * 1000
        if self._place is not None and self._clock.now_ms() - self._looked_back_ms >= interval_ms:
            self._looked_back_ms = self._clock.now_ms()
            async for each in self.look_back():
                yield each
            await self._forget()

    async def look_back(self) -> AsyncIterator[TagRow]:
        """Events that arrived behind the stream's back, of journals that have had no other since."""
        if self._place is None:
            return
        self._metrics.count("tags_back_tracks", tag=self._tag)
        period_s = self._settings.back_track_period_s
        if isinstance(period_s, str):
            from_ms = (await read_buckets(self._store)).before(self._place.time_ms)
        else:
            from_ms = self._place.time_ms - int(period_s * 1000)
        async for row in self._rows(None, max(from_ms, self._floor_ms), self._place.time_ms + 1):
            if row.place > self._place:
                return
            if not self._is_wanted(row):
                continue
            last = self._last.get(life_of(row))
            if last is None or row.tag_seq_nr > last[0]:
                async for each in self._checked(row):
                    self._metrics.count("tags_delayed_found", tag=self._tag)
                    yield each

    async def _rows(self, place: TagPlace | None, from_ms: int, until_ms: int) -> AsyncIterator[TagRow]:
        while rows := await self._store.tag_rows(
            self._tag, after=place, from_ms=from_ms, until_ms=until_ms, limit=self._settings.page_events
        ):
            for row in rows:
                yield row
            place = rows[-1].place

    async def _checked(self, row: TagRow) -> AsyncIterator[TagRow]:
        """The row, with those of its journal that were missing before it; nothing where it is known."""
        if self._is_before(row.place):
            return
        life = life_of(row)
        last = self._last.get(life)
        if last is not None and row.tag_seq_nr <= last[0]:
            return
        first = 1 if last is None else last[0] + 1
        if row.tag_seq_nr > first:
            gap = Gap(row, first, self._floor, self._floor_ms, None if last is None else last[1])
            for missed in await self._fill(gap, seen=last is not None):
                self._last[life] = (missed.tag_seq_nr, missed.place)
                yield missed
        self._last[life] = (row.tag_seq_nr, row.place)
        yield row

    async def _fill(self, gap: Gap, *, seen: bool) -> tuple[TagRow, ...]:
        """Search for as long as the settings say; a journal that was never seen before is then taken as it is."""
        known = seen or self._begins
        timeout_s = self._settings.missing_timeout_s if known else self._settings.new_persistence_id_scan_timeout_s
        deadline_ms = self._clock.now_ms() + timeout_s * 1000
        since = -1
        while True:
            found = await search(self._store, gap, seen=seen, kept=self._settings.deletes == "keep")
            if found.complete or (not known and self._clock.now_ms() >= deadline_ms):
                if found.rows:
                    self._metrics.count("tags_gaps_found", tag=self._tag)
                return found.rows
            if self._clock.now_ms() >= deadline_ms:
                self._metrics.count("tags_events_missing", tag=self._tag)
                raise self._missing(gap)
            since = await self._store.wait_any(timeout_s=SEARCH_AGAIN_S, since=since)

    def _missing(self, gap: Gap) -> MissingTaggedEvent:
        life = gap.life
        last = self._last.get(life)
        place = self._floor if last is None else last[1]
        return MissingTaggedEvent(
            tag=self._tag,
            topic=life.topic,
            id=life.id,
            missing=(gap.first, gap.row.tag_seq_nr - 1),
            last_known_offset=None if place is None else encode_offset(place),
        )

    def _is_wanted(self, row: TagRow) -> bool:
        return self._topics is None or row.topic in self._topics

    def _is_before(self, place: TagPlace) -> bool:
        return place.time_ms < self._floor_ms or (self._floor is not None and place <= self._floor)

    async def _forget(self) -> None:
        """Bound what is remembered: what lies before two buckets ago is then no longer looked for."""
        if len(self._last) <= JOURNALS_MAX or self._place is None:
            return
        oldest_ms = (await read_buckets(self._store)).before(self._place.time_ms)
        self._last = {life: last for life, last in self._last.items() if last[1].time_ms >= oldest_ms}
        self._floor_ms = max(self._floor_ms, oldest_ms)
        self._begins = False
