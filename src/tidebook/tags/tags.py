"""Events by tag: live, ordered, gap-free streams across journals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from operator import attrgetter

from tidebook.core.buckets import Buckets
from tidebook.core.clock import Clock, Ids, RandomIds
from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.core.replication import TagPlace, TagRow
from tidebook.core.settle import give_up
from tidebook.store.port import StoreWriter
from tidebook.tags.asked import asked_topics, check_tag
from tidebook.tags.delay import DelayedStream
from tidebook.tags.event import TaggedEvent
from tidebook.tags.horizon import Horizon, Horizons
from tidebook.tags.offset import beginning, read_through
from tidebook.tags.rebuild import Rebuilt, rebuild_tag
from tidebook.tags.settings import Consistency, TagSettings
from tidebook.tags.sizes import change_size, read_buckets
from tidebook.tags.subscription import LEASE_S, Offsets, Page, Subscription
from tidebook.tags.ticks import Following

#: A stream behind the clock has something new when time has passed, whether or not a pointer moved.
BEHIND_POLL_S = 0.25

_topic = attrgetter("topic")


class Tags:
    """Streams by tag over all topics of a book."""

    def __init__(
        self,
        *,
        store: StoreWriter,
        clock: Clock,
        ids: Ids | None = None,
        settings: TagSettings | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._ids = ids or RandomIds()
        self._store = store
        self._clock = clock
        self._horizons = Horizons(store)
        self._settings = settings or TagSettings()
        self._metrics = metrics or Metrics()
        self._first_ms = _moment_ms(self._settings.first_time_bucket)

    def read(
        self,
        tag: str,
        *,
        after: str | datetime | None = None,
        follow: bool = False,
        topics: Iterable[str] | None = None,
        consistency: Consistency | None = None,
    ) -> AsyncIterator[TaggedEvent]:
        """The events of a tag behind `after`, in one order for everybody; with `follow` it goes on as they come.

        `after` is an event's `tag_offset`, a moment, or None for the beginning. Only what is below the horizon is
        delivered, so nothing can arrive late; `topics` narrows both the stream and the horizon. With
        `consistency="delay"` the stream stays behind the clock instead, and searches for what comes later than that.
        """
        check_tag(tag)
        consistency = consistency or self._settings.consistency
        place, from_ms = beginning(tag, after, self._first_ms)
        wanted = asked_topics(topics)
        match consistency:
            case "horizon":
                return self._below_horizon(tag, place, from_ms, follow, wanted)
            case "delay":
                stream = DelayedStream(
                    tag, place, from_ms, begins=after is None, topics=wanted,
                    store=self._store, clock=self._clock, settings=self._settings, metrics=self._metrics,
                )  # fmt: skip
                return self._behind_clock(stream, follow)
            case _:
                raise InvalidInput(f'consistency is "horizon" or "delay", not {consistency!r}')

    async def _below_horizon(
        self, tag: str, place: TagPlace | None, from_ms: int, follow: bool, topics: frozenset[str] | None
    ) -> AsyncIterator[TaggedEvent]:
        following, since = Following(self._store, self._clock), -1
        while True:
            if follow:
                await following.renew()
            async for page in self._pages(tag, place, from_ms, topics):
                place = page.place
                if page.rows:
                    since = -1
                for event in map(TaggedEvent, page.rows):
                    yield event
            if not follow:
                return
            since = await self._store.wait_any(timeout_s=self._settings.poll_s, since=since)

    async def _pages(
        self, tag: str, place: TagPlace | None, from_ms: int, topics: frozenset[str] | None
    ) -> AsyncIterator[Page]:
        """What is below the horizon now. Nothing comes below it any more, so the last page tells that it was read:
        what lies there and is gone, or of other topics, is never read again.
        """
        horizon = await self._horizons.read(topics)
        self._measure(horizon, topics)
        limit = self._settings.page_events

        def ask(after: TagPlace | None) -> asyncio.Future[Sequence[TagRow]]:
            rows = self._store.tag_rows(tag, after=after, from_ms=from_ms, until_ms=horizon.time_ms, limit=limit)
            return asyncio.ensure_future(rows)

        asked = ask(place)
        try:
            while rows := await asked:
                place = rows[-1].place
                asked = ask(place)  # while this page is used
                if len(rows) >= limit:
                    await asyncio.sleep(0)  # so that it goes out before, for a consumer may never wait
                if topics is not None and not topics.issuperset(map(_topic, rows)):
                    rows = [row for row in rows if row.topic in topics]
                yield Page(rows, place)
        finally:
            give_up(asked)
        if horizon.time_ms > (from_ms if place is None else max(from_ms, place.time_ms)):
            yield Page((), read_through(tag, horizon.time_ms))

    def _measure(self, horizon: Horizon, topics: frozenset[str] | None) -> None:
        """How old the horizon is, and, which does not grow while nothing is appended, what holds it back."""
        of = "*" if topics is None else ",".join(sorted(topics))
        self._metrics.gauge("tags_horizon_lag_seconds", (self._clock.now_ms() - horizon.time_ms) / 1000, topics=of)
        self._metrics.gauge("tags_horizon_behind_seconds", (horizon.most_ms - horizon.time_ms) / 1000, topics=of)

    async def _behind_clock(self, stream: DelayedStream, follow: bool) -> AsyncIterator[TaggedEvent]:
        await stream.scan()
        since = -1
        while True:
            async for row in stream.news():
                since = -1
                yield TaggedEvent(row)
            if not follow:
                async for row in stream.look_back():
                    yield TaggedEvent(row)
                return
            since = await self._store.wait_any(timeout_s=min(self._settings.poll_s, BEHIND_POLL_S), since=since)

    def subscribe(
        self,
        tag: str,
        group: str,
        *,
        topics: Iterable[str] | None = None,
        follow: bool = True,
        offsets: Offsets | None = None,
        lease_s: float = LEASE_S,
    ) -> Subscription:
        """A member of a group that shares the journals of a tag; the store keeps how far the group came.

        `offsets` (see `SqlOffsets`) tells where shares were left, for those who keep that beside their own data.
        """
        check_tag(tag)
        wanted = asked_topics(topics)
        return Subscription(
            tag,
            group,
            read=lambda place: self._pages(tag, place, self._first_ms if place is None else place.time_ms, wanted),
            store=self._store,
            clock=self._clock,
            ids=self._ids,
            offsets=offsets,
            lease_s=lease_s,
            follow=follow,
        )

    async def set_bucket_size(self, size: str) -> Buckets:
        """Let buckets be a "day", an "hour" or a "minute" from now on; the history of sizes, the last to come."""
        return await change_size(self._store, self._clock, size)

    async def buckets(self) -> Buckets:
        """The history of bucket sizes."""
        return await read_buckets(self._store)

    async def rebuild(self, tag: str, *, topics: Iterable[str] | None = None) -> Rebuilt:
        """Write a tag's rows again from the journals in the store, and remove those that no journal speaks of."""
        return await rebuild_tag(self._store, tag, asked_topics(topics), clear=self._settings.deletes == "follow")

    async def horizon(self, topics: Iterable[str] | None = None) -> Horizon:
        """Through which time streams are complete, and which partition holds them there."""
        return await self._horizons.read(asked_topics(topics))

    def list(self) -> AsyncIterator[str]:
        """The tags that have events, each once, in order."""
        return self._store.tags()


def _moment_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"[tags] first_time_bucket: {text!r} is no ISO date") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
