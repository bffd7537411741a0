"""`book.tags`: live, ordered, gap-free streams of events by tag, across journals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from operator import attrgetter

from tidebook.core.buckets import Buckets
from tidebook.core.errors import InvalidInput
from tidebook.core.replication_plan import TagPosition, TagRow
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock, Ids, RandomIds
from tidebook.runtime.futures import cancel_quietly
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.tags.bucket_size import change_size, read_buckets
from tidebook.tags.delayed_stream import DelayedStream
from tidebook.tags.event import TaggedEvent
from tidebook.tags.following import Following
from tidebook.tags.horizon import Horizon, Horizons
from tidebook.tags.offset import position_before, start_position
from tidebook.tags.rebuild import Rebuilt, rebuild_tag
from tidebook.tags.settings import Consistency, TagSettings
from tidebook.tags.stall import HorizonStatus, OnWaiting, StallWatch, lagging_partitions, status_of
from tidebook.tags.subscription import LEASE_S, Offsets, Subscription, SubscriptionPage
from tidebook.tags.validation import check_tag, check_topics

#: A delayed stream may have new events whenever time has passed, even if no pointer moved.
DELAYED_POLL_S = 0.25

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
        log: Log | None = None,
    ) -> None:
        #: Used to detect that streams wait for replication; without it, that is not reported.
        self._log = log
        self._ids = ids or RandomIds()
        self._store = store
        self._clock = clock
        self._horizons = Horizons(store)
        self._settings = settings or TagSettings()
        self._metrics = metrics or Metrics()
        self._first_ms = _parse_ms(self._settings.first_time_bucket)

    def read(
        self,
        tag: str,
        *,
        after: str | datetime | None = None,
        follow: bool = False,
        topics: Iterable[str] | None = None,
        consistency: Consistency | None = None,
        on_waiting: OnWaiting | None = None,
    ) -> AsyncIterator[TaggedEvent]:
        """Yield the events of a tag after `after`, in the same order for every reader; with `follow`, continue live.

        `after` is an event's `tag_offset`, a datetime, or None for the beginning. Only events below the horizon are
        delivered, so none can arrive late; `topics` restricts both the stream and the horizon. With
        `consistency="delay"` the stream stays behind the clock instead, and searches for events that arrive later than
        that.

        A live stream that sees no replication progress for 5 seconds calls `on_waiting` with the horizon, its age and
        the remedy, or logs a warning.
        """
        check_tag(tag)
        consistency = consistency or self._settings.consistency
        position, from_ms = start_position(tag, after, self._first_ms)
        wanted = check_topics(topics)
        match consistency:
            case "horizon":
                return self._below_horizon(tag, position, from_ms, follow, wanted, on_waiting)
            case "delay":
                stream = DelayedStream(
                    tag, position, from_ms, begins=after is None, topics=wanted,
                    store=self._store, clock=self._clock, settings=self._settings, metrics=self._metrics,
                )  # fmt: skip
                return self._delayed(stream, follow, self._watch(f"tag {tag!r}", wanted, on_waiting))
            case _:
                raise InvalidInput(f'consistency is "horizon" or "delay", not {consistency!r}')

    async def _below_horizon(
        self,
        tag: str,
        position: TagPosition | None,
        from_ms: int,
        follow: bool,
        topics: frozenset[str] | None,
        on_waiting: OnWaiting | None,
    ) -> AsyncIterator[TaggedEvent]:
        following, since = Following(self._store, self._clock), -1
        watch = self._watch(f"tag {tag!r}", topics, on_waiting)
        while True:
            if follow:
                await following.renew()
            async for page in self._pages(tag, position, from_ms, topics):
                position = page.position
                if page.rows:
                    since = -1
                for event in map(TaggedEvent, page.rows):
                    yield event
            if not follow:
                return
            if watch is not None:
                await watch.check()
            since = await self._store.wait_any(timeout_s=self._settings.poll_s, since=since)

    async def _pages(
        self, tag: str, position: TagPosition | None, from_ms: int, topics: frozenset[str] | None
    ) -> AsyncIterator[SubscriptionPage]:
        """Yield the pages below the current horizon, then a page without rows at the horizon.

        Nothing can arrive below the horizon any more, so the last page lets readers skip what was deleted there or
        belongs to other topics.
        """
        horizon = await self._horizons.read(topics)
        self._measure(horizon, topics)
        limit = self._settings.page_events

        def request(after: TagPosition | None) -> asyncio.Future[Sequence[TagRow]]:
            rows = self._store.tag_rows(tag, after=after, from_ms=from_ms, until_ms=horizon.time_ms, limit=limit)
            return asyncio.ensure_future(rows)

        pending = request(position)
        try:
            while rows := await pending:
                position = rows[-1].place
                pending = request(position)  # requested while this page is used
                if len(rows) >= limit:
                    await asyncio.sleep(0)  # send the request first: a consumer may never yield to the loop
                if topics is not None and not topics.issuperset(map(_topic, rows)):
                    rows = [row for row in rows if row.topic in topics]
                yield SubscriptionPage(rows, position)
        finally:
            cancel_quietly(pending)
        if horizon.time_ms > (from_ms if position is None else max(from_ms, position.time_ms)):
            yield SubscriptionPage((), position_before(tag, horizon.time_ms))

    def _measure(self, horizon: Horizon, topics: frozenset[str] | None) -> None:
        """Record the age of the horizon, and how far it is held back, which does not grow while nothing is appended."""
        topics_label = "*" if topics is None else ",".join(sorted(topics))
        self._metrics.gauge(
            "tags_horizon_lag_seconds", (self._clock.now_ms() - horizon.time_ms) / 1000, topics=topics_label
        )
        self._metrics.gauge(
            "tags_horizon_behind_seconds", (horizon.most_ms - horizon.time_ms) / 1000, topics=topics_label
        )

    def _watch(self, stream: str, topics: frozenset[str] | None, on_waiting: OnWaiting | None) -> StallWatch | None:
        if self._log is None:
            return None
        return StallWatch(self._log, self._store, self._horizons, self._clock, topics, stream=stream, report=on_waiting)

    async def _delayed(
        self, stream: DelayedStream, follow: bool, watch: StallWatch | None
    ) -> AsyncIterator[TaggedEvent]:
        await stream.scan()
        since = -1
        while True:
            async for row in stream.read_new():
                since = -1
                yield TaggedEvent(row)
            if not follow:
                async for row in stream.backtrack():
                    yield TaggedEvent(row)
                return
            if watch is not None:
                await watch.check()
            since = await self._store.wait_any(timeout_s=min(self._settings.poll_s, DELAYED_POLL_S), since=since)

    def subscribe(
        self,
        tag: str,
        group: str,
        *,
        topics: Iterable[str] | None = None,
        follow: bool = True,
        offsets: Offsets | None = None,
        lease_s: float = LEASE_S,
        on_waiting: OnWaiting | None = None,
    ) -> Subscription:
        """Return a member of a group that shares the journals of a tag; the store keeps the group's offsets.

        `offsets` (see `SqlOffsets`) returns external offsets, for applications that store them with their own data.
        """
        check_tag(tag)
        wanted = check_topics(topics)
        return Subscription(
            tag,
            group,
            read=lambda position: self._pages(
                tag, position, self._first_ms if position is None else position.time_ms, wanted
            ),
            store=self._store,
            clock=self._clock,
            ids=self._ids,
            offsets=offsets,
            lease_s=lease_s,
            follow=follow,
            watch=self._watch(f"group {group!r} of tag {tag!r}", wanted, on_waiting),
        )

    async def set_bucket_size(self, size: str) -> Buckets:
        """Set the bucket size to "day", "hour" or "minute" from now on; return the history of sizes, latest last."""
        return await change_size(self._store, self._clock, size)

    async def buckets(self) -> Buckets:
        """Return the history of bucket sizes."""
        return await read_buckets(self._store)

    async def rebuild(self, tag: str, *, topics: Iterable[str] | None = None) -> Rebuilt:
        """Write a tag's rows again from the journals in the store, and remove rows without an event."""
        return await rebuild_tag(self._store, tag, check_topics(topics), clear=self._settings.deletes == "follow")

    async def horizon(self, topics: Iterable[str] | None = None) -> Horizon:
        """Return the time below which streams are complete, and the partition that holds it there."""
        return await self._horizons.read(check_topics(topics))

    async def status(self, topics: Iterable[str] | None = None) -> HorizonStatus:
        """Return the horizon, its age, what holds it back, and how many records are not replicated yet."""
        wanted = check_topics(topics)
        horizon = await self._horizons.read(wanted)
        lagging = None
        if self._log is not None:
            lagging = await lagging_partitions(self._log, self._store, self._horizons.partitions(wanted))
        lag = None if lagging is None else sum(each.records for each in lagging.values())
        return status_of(horizon, lag, now_ms=self._clock.now_ms())

    def list(self) -> AsyncIterator[str]:
        """Yield the tags that have events, each once, in order."""
        return self._store.tags()


def _parse_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"[tags] first_time_bucket: {text!r} is no ISO date") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
