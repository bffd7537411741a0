"""The horizon of streams by tag: the log time below which no more events can arrive (a low watermark).

The pointer of each partition has the log time through which it is replicated, which never decreases. Everything
strictly below the least of these times is complete and in its final order, regardless of the clocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from operator import itemgetter
from typing import TypeVar

import msgspec

from tidebook.core.errors import Fenced, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock
from tidebook.store.port import StoreWriter

LOGGER = logging.getLogger("tidebook.tags")

#: The time of a partition that was never replicated: it holds everything back.
NEVER_MS = -1
#: How often `read` starts over while topics are being registered, and how many topics are read concurrently.
READS_MAX = 3
CONCURRENT_READS_MAX = 64
#: The store's setting that live streams renew. Its value is a time, but a ticker only watches whether it changes.
FOLLOWED_SETTING = "tags/followed"
RENEW_MS = 3_000
#: Replication without progress for this long, while the log has more records, is reported, and again every minute.
STALL_MS = 5_000
REPORT_EVERY_MS = 60_000
#: How often a stream without new events checks for a stall.
CHECK_EVERY_MS = 1_000
#: How long a check waits for the log, and the pause after a log that did not answer.
LOG_S_MAX = 1.0
LOG_DOWN_MS = 30_000
#: How long a topic's configuration is cached for counting unreplicated records. A store with compare-and-set tables
#: needs several round trips to read it, and concurrent readers of one row delay each other.
CONFIG_S = 15.0
REMEDY = "run 'tidebook up' or 'tidebook pipeline replicate', or open an embedded book with replicate=True"

T = TypeVar("T")


class Horizon(msgspec.Struct, frozen=True):
    """The time below which a set of topics is complete, and the partition that determines it."""

    time_ms: int
    #: The greatest time that any partition has reached.
    most_ms: int
    topic: str | None = None
    partition: int | None = None


def horizon_of(partitions: Mapping[str, int], pointers: Mapping[str, Mapping[int, Pointer]]) -> Horizon:
    """Return the horizon of topics with these numbers of partitions; pointers must be read before the topics."""
    times = [
        (NEVER_MS if (pointer := pointers.get(topic, {}).get(partition)) is None else pointer.time_ms, topic, partition)
        for topic, count in partitions.items()
        for partition in range(count)
    ]
    if not times:
        return Horizon(NEVER_MS, NEVER_MS)
    least_ms, topic, partition = min(times, key=itemgetter(0))
    return Horizon(least_ms, max(times, key=itemgetter(0))[0], topic, partition)


class Horizons:
    """Reads horizons repeatedly, for several streams at once. A topic's number of partitions is read once.

    It only changes if the topic is deleted and created again: then its pointers are missing or have moved backwards.
    They also seem to move backwards if responses arrive out of order; the number is then read again needlessly.
    """

    def __init__(self, store: StoreWriter, log: Log | None = None) -> None:
        self._store = store
        #: Used to find lagging partitions.
        self.log = log
        self._registered: Sequence[str] = ()
        self._partitions: dict[str, int] = {}
        self._pointers: dict[str, Mapping[int, Pointer]] = {}
        #: The configurations with which `lagging` counts, and when they were read.
        self._configs: dict[str, tuple[TopicConfig | None, float]] = {}
        #: When a stream must next renew the request for ticks.
        self.renew_at_ms = 0

    async def read(self, topics: Iterable[str] | None = None) -> Horizon:
        """Read the pointers, then the topics: a topic that is registered in between holds the horizon back."""
        wanted = None if topics is None else list(topics)
        known = wanted if wanted is not None else self._registered or await self._store.topics()
        registered, pointers = known, dict[str, Mapping[int, Pointer]]()
        for _ in range(READS_MAX):
            pointers = await gather_by_topic(self._store.pointers, known)
            if wanted is None:
                self._registered = await self._store.topics()
            registered = wanted if wanted is not None else self._registered
            if pointers.keys() >= set(registered):
                break
            known = registered  # usually registered since the last read: its pointers may exist by now
        for topic in set(self._partitions) - set(registered if wanted is None else self._partitions):
            del self._partitions[topic]
        for topic, found in pointers.items():
            if _moved_backwards(self._pointers.pop(topic, {}), found):
                self._partitions.pop(topic, None)
            if found:  # a reader may name any number of topics that do not exist
                self._pointers[topic] = found
        # A copy: while configurations are read below, another read may remove a topic, which must still count here.
        counts = {topic: self._partitions[topic] for topic in registered if topic in self._partitions}
        new = [topic for topic in registered if topic not in counts]
        for topic, config in (await gather_by_topic(self._store.topic_config, new)).items():
            if config is not None:
                self._partitions[topic] = counts[topic] = config.partitions
        return horizon_of(counts, pointers)

    async def lagging(
        self, topics: Iterable[str] | None = None
    ) -> dict[tuple[str, int], tuple[Position | None, int]] | None:
        """Return the replicated position and the number of records after it, for each lagging partition.

        Only topics that the last `read` found are considered.

        Return None if there is no log, or if it does not answer soon: reads by tag only need the store, and must not
        wait for the log.
        Raise Fenced if a pointer is of a newer epoch than its topic's configuration.
        """
        log, wanted = self.log, self._registered if topics is None else topics
        counts = {topic: self._partitions[topic] for topic in wanted if topic in self._partitions}
        names = list(counts)
        if log is None:
            return None
        pointers = await gather_by_topic(self._store.pointers, names)
        partitions = [(topic, partition) for topic, count in counts.items() for partition in range(count)]
        try:
            firsts = _first_offsets(partitions, pointers, await self._topic_configs(names))
        except Fenced:  # perhaps only because a configuration is outdated
            self._configs.clear()
            firsts = _first_offsets(partitions, pointers, await self._topic_configs(names))

        async def records(topic: str, partition: int) -> int:
            first = firsts[topic, partition] or await log.start(topic, partition)
            return await log.end(topic, partition) - first

        try:
            async with asyncio.timeout(LOG_S_MAX):
                # The log combines these calls into one request.
                counted = await asyncio.gather(*(records(*each) for each in partitions))
        except (TidebookError, TimeoutError):
            return None
        return {
            (topic, number): (None if (at := pointers[topic].get(number)) is None else at.position, count)
            for (topic, number), count in zip(partitions, counted, strict=True)
            if count > 0
        }

    async def _topic_configs(self, topics: Sequence[str]) -> dict[str, TopicConfig | None]:
        now_s = asyncio.get_running_loop().time()
        outdated = [
            topic for topic in topics if topic not in self._configs or now_s - self._configs[topic][1] > CONFIG_S
        ]
        read = await gather_by_topic(self._store.topic_config, outdated)
        self._configs |= {topic: (config, now_s) for topic, config in read.items()}
        return {topic: self._configs[topic][0] for topic in topics}


def _first_offsets(
    partitions: Iterable[tuple[str, int]],
    pointers: Mapping[str, Mapping[int, Pointer]],
    configs: Mapping[str, TopicConfig | None],
) -> dict[tuple[str, int], int]:
    """Return the first offset of each partition that is not replicated; 0 where a topic has no configuration."""
    return {
        (topic, number): first_unreplicated_offset(pointers[topic].get(number), topic, number, config)
        if (config := configs[topic]) is not None
        else 0
        for topic, number in partitions
    }


def _moved_backwards(before: Mapping[int, Pointer], now: Mapping[int, Pointer]) -> bool:
    return any(partition not in now or now[partition].position < old.position for partition, old in before.items())


async def gather_by_topic(read: Callable[[str], Awaitable[T]], topics: Sequence[str]) -> dict[str, T]:
    """Return the result of `read` for each topic, awaited concurrently."""
    found: dict[str, T] = {}
    for first in range(0, len(topics), CONCURRENT_READS_MAX):
        chunk = topics[first : first + CONCURRENT_READS_MAX]
        found |= zip(chunk, await asyncio.gather(*map(read, chunk)), strict=True)
    return found


async def read_horizon(store: StoreWriter, topics: Iterable[str] | None = None) -> Horizon:
    """Return the current horizon."""
    return await Horizons(store).read(topics)


class HorizonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The horizon of streams by tag, what holds it back, and what is not replicated yet."""

    #: Events below this time are delivered; None if a partition was never replicated, or there are no topics.
    horizon: datetime | None
    #: The age of the horizon.
    age_s: float | None
    #: The partition that holds the horizon back.
    topic: str | None
    partition: int | None
    #: Records that the log has and the store does not; None if there is no log, or if it does not answer.
    lag: int | None
    #: For how long the horizon has not moved while a stream waited; 0 if no stream was waiting.
    stalled_s: float = 0.0
    #: How to replicate the missing records; None if there are none, or if the log does not answer.
    remedy: str | None = None

    def describe(self) -> str:
        """Return one sentence with the horizon, its age and the remedy."""
        held_by = f"{self.topic}/{self.partition}"
        where = (
            f"{held_by} was never replicated"
            if self.horizon is None or self.age_s is None
            else f"the horizon is at {self.horizon.isoformat(timespec='milliseconds')}, {self.age_s:,.1f} s ago, "
            f"held back by {held_by}"
        )
        waiting = "" if self.lag is None else f"{self.lag:,} records are not replicated: "
        return f"{waiting}{where}" + (f": {self.remedy}" if self.remedy else "")


OnWaiting = Callable[[HorizonStatus], None]


def status_of(horizon: Horizon, lag: int | None, *, now_ms: int, stalled_s: float = 0.0) -> HorizonStatus:
    """Return the status of a horizon."""
    known = horizon.time_ms >= 0
    return HorizonStatus(
        horizon=datetime.fromtimestamp(horizon.time_ms / 1000, UTC) if known else None,
        age_s=max(0, now_ms - horizon.time_ms) / 1000 if known else None,
        topic=horizon.topic,
        partition=horizon.partition,
        lag=lag,
        stalled_s=stalled_s,
        remedy=REMEDY if lag else None,
    )


async def renew_followed(store: StoreWriter, clock: Clock) -> bool:
    """Renew the setting that announces a live stream: while it changes, idle partitions get ticks often.

    Return False if there is no topic yet. Of two streams that renew it at the same time one succeeds, which is enough.
    The setting is only a hint, so errors of the store are ignored: a store that rejects writes may still serve reads.
    """
    with suppress(Unavailable, OutcomeUnknown):
        if not await store.topics():  # there is nothing to tick, and a reader must not create the store
            return False
        before = await store.setting(FOLLOWED_SETTING)
        if (value := str(clock.now_ms())) != before:
            await store.set_setting(FOLLOWED_SETTING, value, expected=before)
    return True


class HorizonWait:
    """Waits for the horizon to move, for one live stream, and reports replication that makes no progress.

    `waiting` is set while replication makes no progress. A record that has just been appended is not a stall: a
    partition must have been lagging, with its pointer unchanged, for as long as the horizon has not moved.
    """

    def __init__(
        self,
        store: StoreWriter,
        clock: Clock,
        horizons: Horizons,
        topics: frozenset[str] | None,
        *,
        stream: str,
        report: OnWaiting | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._horizons = horizons
        self._topics = topics
        self._stream = stream
        self._report = report or self._warn
        self._since = -1
        self._check_at_ms = clock.monotonic_ms()
        self._horizon_ms: int | None = None
        self._horizon_since_ms = 0
        #: The pointer of each lagging partition, and when it was first seen there.
        self._lagging: dict[tuple[str, int], tuple[Position | None, int]] = {}
        self._reported_ms: int | None = None
        self.waiting: HorizonStatus | None = None

    async def ask_for_ticks(self) -> None:
        """Renew the hint to the pipeline that a stream is live, unless a stream of this book did so recently."""
        now_ms, horizons = self._clock.monotonic_ms(), self._horizons
        if now_ms >= horizons.renew_at_ms:
            horizons.renew_at_ms = now_ms + RENEW_MS  # before the call, so that no other stream of this book renews too
            if not await renew_followed(self._store, self._clock):
                horizons.renew_at_ms = now_ms

    async def wait(self, timeout_s: float, *, delivered: bool) -> None:
        """Wait until a pointer may have moved; if rows were just `delivered`, start with the shortest interval."""
        await self._check()
        self._since = await self._store.wait_any(timeout_s=timeout_s, since=-1 if delivered else self._since)

    async def _check(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._horizons.log is None or now_ms < self._check_at_ms:
            return
        self._check_at_ms = now_ms + CHECK_EVERY_MS
        try:
            horizon = await self._horizons.read(self._topics)
            lagging = await self._horizons.lagging(self._topics)
        except Unavailable:  # the stream itself reports a store that stays down; this check must not end it
            return
        if horizon.time_ms != self._horizon_ms:
            self._horizon_ms, self._horizon_since_ms = horizon.time_ms, now_ms
        if lagging is None:
            self._check_at_ms = now_ms + LOG_DOWN_MS
            return
        before, self._lagging = self._lagging, {}
        for key, (position, _) in lagging.items():
            seen, since_ms = before.get(key, (position, now_ms))
            self._lagging[key] = (position, since_ms if seen == position else now_ms)
        lagging_since_ms = min((since for _, since in self._lagging.values()), default=now_ms)
        stalled_ms = now_ms - max(self._horizon_since_ms, lagging_since_ms)
        if stalled_ms < STALL_MS:
            self.waiting = self._reported_ms = None
            return
        lag = sum(count for _, count in lagging.values())
        self.waiting = status_of(horizon, lag, now_ms=self._clock.now_ms(), stalled_s=stalled_ms / 1000)
        if self._reported_ms is None or now_ms - self._reported_ms >= REPORT_EVERY_MS:
            self._reported_ms = now_ms
            self._report(self.waiting)

    def _warn(self, status: HorizonStatus) -> None:
        LOGGER.warning("%s has waited %.0f s for replication: %s", self._stream, status.stalled_s, status.describe())
