"""Ticks: `Mark` records that advance the log time of idle partitions, so that these do not hold the horizon back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import msgspec

from tidebook.core.action import Mark
from tidebook.core.errors import Fenced, TidebookError
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Acknowledged, Log, Outgoing
from tidebook.replication.partition import LogAndStore, Partition, PartitionReplicator
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import FOLLOWED_SETTING, NEVER_MS, gather_by_topic, read_horizon

#: The store's setting with the greatest replicated time of all pipelines, which ticks must advance the horizon past.
REPLICATED_TIME_SETTING = "tags/shown"
SHARE_ATTEMPTS_MAX = 5
#: A stream counts as live for this long after its setting changed.
FOLLOWED_FOR_S = 10.0
#: How often a ticker without live streams reads their setting.
FOLLOWED_CHECK_S = 1.0
#: How long a topic gets no ticks after one of them failed.
FAILED_PAUSE_S = 5.0
#: If there are more ticks than this, the job's tasks replicate them in parallel.
ADJACENT_TICKS_MAX = 64
LOGGER = logging.getLogger("tidebook.replication")


class TickIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """The intervals at which a ticker sends ticks, where they are useful."""

    #: The interval while there are live streams.
    followed_s: float = 0.1
    #: The interval without live streams.
    idle_s: float = 5.0
    #: The pause of a ticker with live streams after a step that found nothing to tick.
    pause_s: float = 0.01
    #: How often the setting of live streams is read.
    check_s: float = FOLLOWED_CHECK_S


#: The offset of the last tick of each partition.
Ticks = Mapping[Partition, int]


async def tick(
    log: Log, store: StoreWriter, topics: Iterable[str] | None = None, *, seen_ms: int = NEVER_MS
) -> dict[Partition, int]:
    """Append a tick with the time after the greatest replicated one to each partition.

    Return the ticks' offsets. When the ticks are replicated, everything that was in the store before is below the
    horizon, for these topics and up to `seen_ms`, the greatest time that other topics have reached.
    """
    configs, pointers = await _read_progress(store, topics)
    most_ms = max([seen_ms, *(each.time_ms for each in pointers.values() if each is not None)])
    ticks, failed = await _append_ticks(log, configs, list(pointers), most_ms + 1)
    for error in failed.values():
        raise error
    return ticks


async def send_ticks(log: Log, store: StoreWriter, topics: Sequence[str] = ()) -> Ticks:
    """Send a tick to every partition and return their offsets; a book without tags gets none."""
    if not await has_tags(store):
        return {}
    seen_ms = NEVER_MS
    if topics:  # other pipelines replicate the other topics, and all share one horizon
        seen_ms = await share_replicated_time(store, (await read_horizon(store)).most_ms)
    return await tick(log, store, topics, seen_ms=seen_ms)


async def partition_replicators(
    log: Log, store: StoreWriter, partitions: Iterable[Partition], *, clear_tags: bool = True
) -> dict[Partition, PartitionReplicator]:
    """Return a replicator for each of these partitions, except those of topics that no longer exist."""
    parts, wanted = LogAndStore(log, store), list(partitions)
    configs = await gather_by_topic(store.topic_config, list({topic for topic, _ in wanted}))
    return {
        (topic, partition): PartitionReplicator(parts, topic, partition, config, clear_tags=clear_tags)
        for topic, partition in wanted
        if (config := configs[topic]) is not None
    }


async def replicate_adjacent_ticks(log: Log, store: StoreWriter, ticks: Ticks) -> None:
    """Replicate in this process the ticks that are the first unreplicated record of their partition.

    These then need not wait for a micro-batch; the job skips records that are already replicated.
    """
    if not 0 < len(ticks) <= ADJACENT_TICKS_MAX:
        return

    async def one(replicator: PartitionReplicator, offset: int) -> None:
        with suppress(Fenced):  # another replicator has moved the pointer
            if await replicator.next_offset() == offset:
                await replicator.catch_up(offset + 1)

    replicators = await partition_replicators(log, store, ticks)
    await asyncio.gather(*(one(each, ticks[partition]) for partition, each in replicators.items()))


class _LastTick(msgspec.Struct, frozen=True):
    """A partition's last tick; `is_adjacent` if it was sent directly after the last replicated record."""

    position: Position
    is_adjacent: bool


class Ticker:
    """Appends ticks periodically, but only where a tick can bring something below the horizon.

    A ticker writes to its own topics only. The time that they must pass is agreed on by all pipelines: each one shares
    the time of its replicated records in a setting. Pointers cannot be used for that: ticks move them too, so two
    tickers would answer each other's ticks forever.
    """

    def __init__(
        self,
        log: Log,
        store: StoreWriter,
        topics: Sequence[str] = (),
        *,
        intervals: TickIntervals | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._intervals = intervals or TickIntervals()
        self._log = log
        self._store = store
        self._topics = tuple(topics) or None
        self._now_s = monotonic_s
        self._tagged = False
        self._last: dict[Partition, _LastTick] = {}
        #: The horizon must pass this time, so that all replicated records are below it.
        self._replicated_ms = NEVER_MS
        self._begun = False
        self._ticked_s = -self._intervals.idle_s
        self._followed: str | None = None
        self._followed_s = -FOLLOWED_FOR_S
        self._checked_s = -self._intervals.check_s
        self._since = -1
        #: Until when a topic gets no ticks because one failed, and the errors that were not reported yet. A topic may
        #: have lost its log, and the others must not wait for it.
        self._paused_until_s: dict[str, float] = {}
        self._errors: list[Exception] = []
        #: Ticks of earlier steps that are now the first unreplicated record of their partition.
        self._next_ticks: dict[Partition, int] = {}
        #: With live streams: the offsets of the ticks that directly follow the last replicated record, seen by the last
        #: step. A tick that was sent after records becomes one of them when these are replicated.
        self.adjacent: Ticks = {}

    async def step(self) -> float:
        """Append ticks if they are due and useful; return after how many seconds to call this again."""
        self.adjacent = {}
        followed = await self._is_followed()
        now_s = self._now_s()
        followed_s = self._intervals.followed_s
        left_s = self._ticked_s + (followed_s if followed else self._intervals.idle_s) - now_s
        if left_s > followed_s / 2:
            return min(left_s, followed_s if followed else FOLLOWED_CHECK_S)
        # With live streams a step that found nothing to tick does not postpone the next tick.
        ticks = await self._tick(followed=followed)
        if ticks or not followed:
            self._ticked_s, self._since = now_s, -1
        if followed:
            self.adjacent = self._next_ticks | {
                partition: offset for partition, offset in ticks.items() if self._last[partition].is_adjacent
            }
        return followed_s if followed else FOLLOWED_CHECK_S

    async def tick(self) -> Ticks:
        """Append the ticks that are useful now; return their offsets."""
        return await self._tick(followed=False)

    async def pause(self, wait_s: float) -> None:
        """Wait for `wait_s`; with live streams, if the next tick may be sent, only until the store has changed."""
        followed_s, pause_s = self._intervals.followed_s, self._intervals.pause_s
        if wait_s > followed_s or self._now_s() - self._ticked_s < followed_s / 2:
            await asyncio.sleep(wait_s)
            return
        await asyncio.sleep(pause_s)
        self._since = await self._store.wait_any(timeout_s=wait_s - pause_s, since=self._since)

    async def run_woken(self, metrics: Metrics) -> None:
        """Tick whenever the store has changed, until this is cancelled; another task replicates the ticks.

        Use it for a store that wakes its waiters, so that an idle store is polled only once a second.
        """
        since = -1
        while True:
            try:
                wait_s = await self.step()
                self._report_errors(metrics)
                # With live streams a step that comes after this pause is never too early.
                rest_s = self._ticked_s + self._intervals.followed_s - self._now_s()
                await asyncio.sleep(max(self._intervals.pause_s, rest_s))
                timeout_s = FOLLOWED_CHECK_S if wait_s <= self._intervals.followed_s else wait_s
                since = await self._store.wait_any(timeout_s=timeout_s, since=since)
            except Exception as error:
                self._failed(error, metrics)
                await asyncio.sleep(FOLLOWED_CHECK_S)

    async def run(self, metrics: Metrics) -> None:
        """Tick until this is cancelled: often while a tag stream is followed, else rarely."""
        wait_s = FOLLOWED_CHECK_S
        while True:
            await asyncio.sleep(wait_s)
            try:
                wait_s = await self.step()
                self._report_errors(metrics)
                if wait_s <= self._intervals.followed_s:
                    await replicate_adjacent_ticks(self._log, self._store, self.adjacent)
                    await self.pause(wait_s)
                    wait_s = 0.0
            except Exception as error:
                self._failed(error, metrics)
                wait_s = FOLLOWED_CHECK_S

    def _report_errors(self, metrics: Metrics) -> None:
        for error in self._errors:
            self._failed(error, metrics)
        self._errors.clear()

    def _failed(self, error: Exception, metrics: Metrics) -> None:
        """Report an error of a step, which is retried: without ticks the horizon would never advance again."""
        metrics.count("tags_tick_failures")
        if not isinstance(error, TidebookError):  # replication fails for the same reason, and reports that error
            LOGGER.error("a tick failed; it is retried", exc_info=error)

    async def _is_followed(self) -> bool:
        now_s = self._now_s()
        if now_s - self._checked_s >= self._intervals.check_s:
            self._checked_s = now_s
            found = await self._store.setting(FOLLOWED_SETTING)
            # The clocks of two machines are not compared: only a change of the value counts.
            if found is not None and found != self._followed:
                self._followed, self._followed_s = found, now_s
        return now_s - self._followed_s < FOLLOWED_FOR_S

    async def _tick(self, *, followed: bool) -> Ticks:
        """Append the ticks that are useful; return their offsets."""
        self._tagged = self._tagged or await has_tags(self._store)
        if not self._tagged and not followed:
            return {}
        configs, pointers = await _read_progress(self._store, self._topics)
        if self._topics is not None and not self._begun:
            # The pipelines of the other topics may not have shared their times yet.
            self._replicated_ms = (await read_horizon(self._store)).most_ms
        self._begun = True
        in_flight = set()
        self._next_ticks = {}
        for partition, pointer in pointers.items():
            last = self._last.get(partition)
            if last is not None and (pointer is None or pointer.position < last.position):
                in_flight.add(partition)  # one tick is enough for a partition that is stuck
                if pointer is not None and pointer.position.next == last.position:
                    self._next_ticks[partition] = last.position.offset
            elif pointer is not None and (last is None or not last.is_adjacent or pointer.position > last.position):
                self._replicated_ms = max(self._replicated_ms, pointer.time_ms)
                self._last[partition] = _LastTick(pointer.position, True)
        if self._topics is not None:
            self._replicated_ms = await share_replicated_time(self._store, self._replicated_ms)
        now_s = self._now_s()
        self._paused_until_s = {topic: until_s for topic, until_s in self._paused_until_s.items() if until_s > now_s}
        lagging = [
            partition
            for partition, pointer in pointers.items()
            if partition not in in_flight
            and partition[0] not in self._paused_until_s
            and (pointer is None or pointer.time_ms <= self._replicated_ms)
        ]
        ticks, failed = await _append_ticks(self._log, configs, lagging, self._replicated_ms + 1)
        self._errors += failed.values()
        self._paused_until_s |= dict.fromkeys(failed, now_s + FAILED_PAUSE_S)
        for partition, offset in ticks.items():
            pointer, epoch = pointers[partition], configs[partition[0]].epoch
            before = -1 if pointer is None or pointer.position.epoch < epoch else pointer.position.offset
            if offset <= before:  # the log was created again, and is not adopted yet
                self._paused_until_s[partition[0]] = now_s + FAILED_PAUSE_S
            self._last[partition] = _LastTick(Position(epoch, offset), is_adjacent=offset == before + 1)
        return ticks


@contextmanager
def ticking(portal: BlockingPortal, ticker: Ticker, metrics: Metrics) -> Iterator[None]:
    """Run a ticker on the portal's loop within the context."""

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(ticker.run(metrics))

    async def stop() -> None:
        task.cancel()
        await asyncio.wait([task])

    task = portal.run(start())
    try:
        yield
    finally:
        portal.run(stop())


async def share_replicated_time(store: StoreWriter, replicated_ms: int) -> int:
    """Share the greatest replicated time with the other pipelines; return the greatest time that any has shared."""
    shared_ms = NEVER_MS
    for _ in range(SHARE_ATTEMPTS_MAX):
        text = await store.setting(REPLICATED_TIME_SETTING)
        shared_ms = NEVER_MS if text is None else int(text)
        if shared_ms >= replicated_ms or await store.set_setting(
            REPLICATED_TIME_SETTING, str(replicated_ms), expected=text
        ):
            break
    return max(shared_ms, replicated_ms)  # if every attempt lost a race, the next tick shares it


async def has_tags(store: StoreWriter) -> bool:
    """Return whether any event was ever tagged."""
    async for _ in store.tags():
        return True
    return False


async def needs_ticks(store: StoreWriter) -> bool:
    """Return whether any event was ever tagged, or any stream was ever followed."""
    return await has_tags(store) or await store.setting(FOLLOWED_SETTING) is not None


async def _read_progress(
    store: StoreWriter, topics: Iterable[str] | None
) -> tuple[dict[str, TopicConfig], dict[Partition, Pointer | None]]:
    """Return the configurations of the topics, and the pointer of each partition."""
    found = await gather_by_topic(store.topic_config, list(topics or await store.topics()))
    configs = {topic: config for topic, config in found.items() if config is not None}
    pointers = await gather_by_topic(store.pointers, list(configs))
    return configs, {
        (topic, partition): pointers[topic].get(partition)
        for topic, config in configs.items()
        for partition in range(config.partitions)
    }


async def _append_ticks(
    log: Log, configs: Mapping[str, TopicConfig], partitions: Sequence[Partition], time_ms: int
) -> tuple[dict[Partition, int], dict[str, Exception]]:
    """Append a tick with this time to each of the partitions; return the ticks' offsets, and topics' errors."""
    values = {
        topic: encode_record(Mark(config.epoch, time_ms), limit_bytes=config.limit_bytes)
        for topic, config in configs.items()
    }
    appends = (log.append(Outgoing(*each, None, values[each[0]])) for each in partitions)
    ticks: dict[Partition, int] = {}
    failed: dict[str, Exception] = {}
    for each, done in zip(partitions, await asyncio.gather(*appends, return_exceptions=True), strict=True):
        match done:
            case Acknowledged():
                ticks[each] = done.offset
            case Exception():
                failed[each[0]] = done
            case _:
                raise done
    return ticks, failed
