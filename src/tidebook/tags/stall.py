"""Detect that a live stream waits for replication that has stopped, and report it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.core.position import Position
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import Horizon, Horizons, gather_by_topic

LOGGER = logging.getLogger("tidebook.tags")

#: Replication without progress for this long, while the log has more records, is reported, and again every minute.
STALL_MS = 5_000
REPORT_EVERY_MS = 60_000
#: How often a stream without new events checks.
CHECK_EVERY_MS = 1_000
#: How long a check waits for the log, and the pause after a log that did not answer.
LOG_S_MAX = 1.0
LOG_DOWN_MS = 30_000

REMEDY = "run 'tidebook pipeline replicate', or 'tidebook up', which does"


class HorizonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The horizon of streams by tag, what holds it back, and what is not replicated yet."""

    #: Events below this time are delivered; None if a partition was never replicated, or there are no topics.
    horizon: datetime | None
    #: The age of the horizon.
    age_s: float | None
    #: The partition that holds the horizon back.
    topic: str | None
    partition: int | None
    #: Records that the log has and the store does not; None if the log does not answer.
    lag: int | None
    #: How long the horizon has not moved under a waiting stream; 0 if no stream was watching.
    stalled_s: float = 0.0
    #: What to do about it; None if nothing is waiting.
    remedy: str | None = None

    def describe(self) -> str:
        """Return one sentence with the horizon, its age and the remedy."""
        held_by = f"{self.topic}/{self.partition}"
        where = (
            f"{held_by} was never replicated"
            if self.horizon is None or self.age_s is None
            else f"the horizon is at {self.horizon.isoformat(timespec='milliseconds')}, {self.age_s:,.1f} s ago, "
            f"held by {held_by}"
        )
        waiting = "" if self.lag is None else f"{self.lag:,} records are not replicated: "
        return f"{waiting}{where}" + (f": {self.remedy}" if self.remedy else "")


OnWaiting = Callable[[HorizonStatus], None]


class PartitionLag(msgspec.Struct, frozen=True):
    """A partition whose log has records that the store lacks."""

    #: The pointer's position; None if it was never replicated.
    replicated: Position | None
    records: int


async def lagging_partitions(
    log: Log, store: StoreWriter, topics: Mapping[str, int]
) -> dict[tuple[str, int], PartitionLag] | None:
    """Return the partitions that are not replicated to the end of the log; `topics` has the numbers of partitions.

    Return None if the log does not answer soon: reads by tag only need the store, and must not wait for the log.
    """
    names = list(topics)
    pointers = await gather_by_topic(store.pointers, names)
    configs = await gather_by_topic(store.topic_config, names)

    async def records(topic: str, partition: int) -> int:
        pointer, config = pointers[topic].get(partition), configs[topic]
        if pointer is not None and config is not None and pointer.position.epoch == config.epoch:
            return await log.end(topic, partition) - pointer.position.offset - 1
        return await log.end(topic, partition) - await log.start(topic, partition)

    partitions = [(topic, partition) for topic, count in topics.items() for partition in range(count)]
    try:
        async with asyncio.timeout(LOG_S_MAX):
            # The log combines these calls into one request.
            counted = await asyncio.gather(*(records(*each) for each in partitions))
    except (TidebookError, TimeoutError):
        return None
    found = dict(zip(partitions, counted, strict=True))
    return {
        (topic, partition): PartitionLag(None if (at := pointers[topic].get(partition)) is None else at.position, count)
        for (topic, partition), count in found.items()
        if count > 0
    }


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


class StallWatch:
    """Watches replication for a stream without new events; `waiting` is set while replication makes no progress.

    A record that has just been appended is no stall: a partition must have been lagging, with its pointer unchanged,
    for as long as the horizon has not moved.
    """

    def __init__(
        self,
        log: Log,
        store: StoreWriter,
        horizons: Horizons,
        clock: Clock,
        topics: frozenset[str] | None,
        *,
        stream: str,
        report: OnWaiting | None = None,
    ) -> None:
        self._log = log
        self._store = store
        self._horizons = horizons
        self._clock = clock
        self._topics = topics
        self._stream = stream
        self._report = report or self._warn
        self._check_at_ms: int | None = None
        self._seen_ms: int | None = None
        self._since_ms = 0
        #: By lagging partition: its pointer, and since when it has been there.
        self._lagging: dict[tuple[str, int], tuple[Position | None, int]] = {}
        self._reported_ms: int | None = None
        self.waiting: HorizonStatus | None = None

    async def check(self) -> None:
        """Check for progress; report if there is none while the log has more records."""
        now_ms = self._clock.monotonic_ms()
        if self._check_at_ms is not None and now_ms < self._check_at_ms:
            return
        self._check_at_ms = now_ms + CHECK_EVERY_MS
        horizon = await self._horizons.read(self._topics)
        if horizon.time_ms != self._seen_ms:
            self._seen_ms, self._since_ms = horizon.time_ms, now_ms
        lagging = await lagging_partitions(self._log, self._store, self._horizons.partitions(self._topics))
        if lagging is None:
            self._check_at_ms = now_ms + LOG_DOWN_MS
            return
        before, self._lagging = self._lagging, {}
        for partition_key, each in lagging.items():
            pointer, since_ms = before.get(partition_key, (each.replicated, now_ms))
            self._lagging[partition_key] = (each.replicated, since_ms if pointer == each.replicated else now_ms)
        stalled_ms = now_ms - max(self._since_ms, min((since for _, since in self._lagging.values()), default=now_ms))
        if stalled_ms < STALL_MS:
            self.waiting = self._reported_ms = None
            return
        lag = sum(each.records for each in lagging.values())
        self.waiting = status_of(horizon, lag, now_ms=self._clock.now_ms(), stalled_s=stalled_ms / 1000)
        if self._reported_ms is None or now_ms - self._reported_ms >= REPORT_EVERY_MS:
            self._reported_ms = now_ms
            self._report(self.waiting)

    def _warn(self, status: HorizonStatus) -> None:
        LOGGER.warning("%s has waited %.0f s for replication: %s", self._stream, status.stalled_s, status.describe())
