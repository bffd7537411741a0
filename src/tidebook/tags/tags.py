"""`book.tags`: live, ordered, gap-free streams of events by tag, across journals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, overload

from tidebook.core.buckets import BUCKETS_SETTING, LEAD_MS, Buckets, decode_buckets, encode_buckets
from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.core.replication_plan import TagPosition, TagRow
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock, Ids, RandomIds
from tidebook.runtime.futures import cancel_quietly
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.tags.delayed_stream import DelayedStream, read_buckets
from tidebook.tags.event import (
    Decode,
    E,
    TaggedEvent,
    check_tag,
    check_topics,
    decode_raw,
    position_before,
    start_position,
)
from tidebook.tags.horizon import Horizon, Horizons, HorizonStatus, HorizonWait, OnWaiting, status_of
from tidebook.tags.rebuild import Rebuilt, rebuild_tag
from tidebook.tags.settings import Consistency, TagSettings
from tidebook.tags.subscription import LEASE_S, Offsets, Subscription, SubscriptionPage

#: A delayed stream may have new events whenever time has passed, even if no pointer moved.
DELAYED_POLL_S = 0.25
BUCKET_CHANGES_MAX = 10
#: How many sets of topics have gauges; a reader may ask for any set, even of topics that do not exist.
REPORTED_MAX = 1_000

#: Returns the decoder of the payloads of classes.
DecoderOf = Callable[[Iterable[type[Any]]], Decode]

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
        decoder_of: DecoderOf | None = None,
    ) -> None:
        self._ids = ids or RandomIds()
        self._store = store
        self._clock = clock
        #: Without the log, streams that wait for replication are not reported.
        self._horizons = Horizons(store, log)
        self._settings = settings or TagSettings()
        self._metrics = metrics or Metrics()
        self._decoder_of = decoder_of
        self._first_ms = _parse_ms(self._settings.first_time_bucket)
        #: The sets of topics whose horizon has gauges.
        self._reported: set[str] = set()

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
        that: it delivers them when it finds them, so readers may see different orders.

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
                    tag, position, from_ms, from_beginning=after is None, topics=wanted,
                    store=self._store, clock=self._clock, settings=self._settings, metrics=self._metrics,
                )  # fmt: skip
                return self._delayed(stream, follow, self._horizon_wait(f"tag {tag!r}", wanted, on_waiting))
            case _:
                raise InvalidInput(f'consistency must be "horizon" or "delay", not {consistency!r}')

    async def _below_horizon(
        self,
        tag: str,
        position: TagPosition | None,
        from_ms: int,
        follow: bool,
        topics: frozenset[str] | None,
        on_waiting: OnWaiting | None,
    ) -> AsyncIterator[TaggedEvent]:
        horizon_wait = self._horizon_wait(f"tag {tag!r}", topics, on_waiting)
        while True:
            delivered = False
            if follow:
                await horizon_wait.ask_for_ticks()
            async for page in self._pages(tag, position, from_ms, topics):
                position = page.position
                delivered = delivered or bool(page.rows)
                for row in page.rows:
                    yield TaggedEvent(row)
            if not follow:
                return
            await horizon_wait.wait(self._settings.poll_s, delivered=delivered)

    async def _pages(
        self, tag: str, position: TagPosition | None, from_ms: int, topics: frozenset[str] | None
    ) -> AsyncIterator[SubscriptionPage]:
        """Yield the pages below the current horizon, then a page without rows at the horizon.

        Nothing can arrive below the horizon any more, so the last page lets readers skip what was deleted there or
        belongs to other topics.
        """
        horizon = await self._horizons.read(topics)
        self._report(horizon, "*" if topics is None else ",".join(sorted(topics)))
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

    def _report(self, horizon: Horizon, label: str) -> None:
        if horizon.topic is None or (label not in self._reported and len(self._reported) >= REPORTED_MAX):
            return
        self._reported.add(label)
        lag_ms, behind_ms = self._clock.now_ms() - horizon.time_ms, horizon.most_ms - horizon.time_ms
        self._metrics.gauge("tags_horizon_lag_seconds", lag_ms / 1000, topics=label)
        # Unlike the lag, this does not grow while nothing is appended.
        self._metrics.gauge("tags_horizon_behind_seconds", behind_ms / 1000, topics=label)

    def _horizon_wait(self, stream: str, topics: frozenset[str] | None, on_waiting: OnWaiting | None) -> HorizonWait:
        return HorizonWait(self._store, self._clock, self._horizons, topics, stream=stream, report=on_waiting)

    async def _delayed(
        self, stream: DelayedStream, follow: bool, horizon_wait: HorizonWait
    ) -> AsyncIterator[TaggedEvent]:
        await stream.scan()
        while True:
            delivered = False
            async for row in stream.read_new():
                delivered = True
                yield TaggedEvent(row)
            if not follow:
                async for row in stream.backtrack():
                    yield TaggedEvent(row)
                return
            await horizon_wait.wait(min(self._settings.poll_s, DELAYED_POLL_S), delivered=delivered)

    @overload
    def subscribe(
        self, tag: str, group: str, *, events: Iterable[type[E]], topics: Iterable[str] | None = None,
        follow: bool = True, offsets: Offsets | None = None, lease_s: float = LEASE_S,
        on_waiting: OnWaiting | None = None,
    ) -> Subscription[E]: ...  # fmt: skip
    @overload
    def subscribe(
        self, tag: str, group: str, *, events: Iterable[type] | None = None, topics: Iterable[str] | None = None,
        follow: bool = True, offsets: Offsets | None = None, lease_s: float = LEASE_S,
        on_waiting: OnWaiting | None = None,
    ) -> Subscription[Any]: ...  # fmt: skip
    def subscribe(
        self,
        tag: str,
        group: str,
        *,
        events: Iterable[type[Any]] | None = None,
        topics: Iterable[str] | None = None,
        follow: bool = True,
        offsets: Offsets | None = None,
        lease_s: float = LEASE_S,
        on_waiting: OnWaiting | None = None,
    ) -> Subscription[Any]:
        """Return a member of a group that shares the journals of a tag; the store keeps the group's offsets.

        `offsets` (see `SqlOffsets`) returns external offsets, for applications that store them with their own data.
        With `events`, the classes of the tag's events, `payload` is an object of these classes, and raises
        UnknownEventType for any other event.
        """
        check_tag(tag)
        if events is not None and self._decoder_of is None:
            raise InvalidInput("these streams were created without a book, so they cannot decode events as classes")
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
            horizon_wait=self._horizon_wait(f"group {group!r} of tag {tag!r}", wanted, on_waiting),
            decode=decode_raw if events is None or self._decoder_of is None else self._decoder_of(events),
        )

    async def set_bucket_size(self, size: str) -> Buckets:
        """Set the bucket size of later rows to "day", "hour" or "minute"; return the history of sizes, latest last.

        It changes from a time after everything that was written. Replicators only write rows before `fixed_ms`, which
        they move by a compare-and-set of the same setting. So neither side overlooks the other, however long it pauses.
        """
        for _ in range(BUCKET_CHANGES_MAX):
            text = await self._store.setting(BUCKETS_SETTING)
            before = Buckets() if text is None else decode_buckets(text)
            last = before.changes[-1]
            if last.size == size:
                return before
            horizon = await Horizons(self._store).read()
            # Twice the lead: replicators of an older version do not move `fixed_ms`, but read the history every 15 s.
            from_ms = max(horizon.most_ms, self._clock.now_ms()) + 2 * LEAD_MS
            after = before.changed(size, from_ms=max(from_ms, before.fixed_ms, last.from_ms + LEAD_MS))
            if await self._store.set_setting(BUCKETS_SETTING, encode_buckets(after), expected=text):
                return after
        raise Unavailable(f"the size of buckets was changed concurrently {BUCKET_CHANGES_MAX} times: try again")

    async def buckets(self) -> Buckets:
        """Return the history of bucket sizes."""
        return await read_buckets(self._store)

    async def rebuild(self, tag: str, *, topics: Iterable[str] | None = None) -> Rebuilt:
        """Write a tag's rows again from the journals in the store, and remove rows without an event."""
        return await rebuild_tag(self._store, tag, check_topics(topics), clear=self._settings.deletes == "follow")

    async def horizon(self, topics: Iterable[str] | None = None) -> Horizon:
        """Return the time below which streams are complete, and the partition that determines it."""
        return await self._horizons.read(check_topics(topics))

    async def status(self, topics: Iterable[str] | None = None) -> HorizonStatus:
        """Return the horizon, its age, what holds it back, and how many records are not replicated yet."""
        wanted = check_topics(topics)
        horizon = await self._horizons.read(wanted)
        lagging = await self._horizons.lagging(wanted)
        lag = None if lagging is None else sum(count for _, count in lagging.values())
        return status_of(horizon, lag, now_ms=self._clock.now_ms())

    def list(self) -> AsyncIterator[str]:
        """Yield the tags that have events, each once, in order."""
        return self._store.tags()


def _parse_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"[tags] first_time_bucket: {text!r} is not an ISO date") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
