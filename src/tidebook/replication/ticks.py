"""Ticks: `Mark` records that advance the time of idle partitions, so that these do not hold the horizon back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tidebook.core.action import Mark
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication_plan import Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Log, Outgoing
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import FOLLOWED_SETTING, NEVER_MS, gather_by_topic, read_horizon

#: The greatest replicated time of all pipelines that share a store: the time that ticks must bring the horizon past.
SHOWN_SETTING = "tags/shown"
SHARE_TRIES_MAX = 5
#: A stream counts as live for this long after its setting changed.
FOLLOWED_FOR_S = 10.0
FOLLOWED_EVERY_S = 0.1
#: The pause of a ticker with live streams after a step that found nothing to tick.
LOOK_AGAIN_S = 0.01
IDLE_EVERY_S = 5.0
#: How often a ticker without live streams reads their setting.
LOOK_EVERY_S = 1.0

Partition = tuple[str, int]


async def tick(
    log: Log, store: StoreWriter, topics: Iterable[str] | None = None, *, seen_ms: int = NEVER_MS
) -> dict[Partition, int]:
    """Append a tick with the time after the greatest replicated one to each partition at or before that time.

    Return the ticks' offsets. When the ticks are replicated, everything that was in the store before is below the
    horizon, for these topics and up to `seen_ms`, the greatest time that other topics have reached.
    """
    configs, pointers = await _read_progress(store, topics)
    most_ms = max((each.time_ms for of in pointers.values() for each in of.values()), default=NEVER_MS)
    most_ms = max(most_ms, seen_ms)
    lagging = [
        (topic, partition)
        for topic, config in configs.items()
        for partition in range(config.partitions)
        if (pointer := pointers[topic].get(partition)) is None or pointer.time_ms <= most_ms
    ]
    return await _append_ticks(log, configs, lagging, most_ms + 1)


class _LastTick(msgspec.Struct, frozen=True):
    """A partition's last tick; `alone`: it directly follows the last replicated record at the time it was sent."""

    position: Position
    alone: bool


class Ticker:
    """Appends ticks periodically, but only where a tick can bring something below the horizon.

    A ticker writes to its own topics only. The time that they must pass is agreed on by all pipelines: each one shares
    the time of its replicated records in a setting. Pointers cannot serve for that: ticks move them too, so two
    tickers would answer each other's ticks for ever.
    """

    def __init__(
        self,
        log: Log,
        store: StoreWriter,
        topics: Sequence[str] = (),
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._store = store
        self._topics = tuple(topics) or None
        self._now_s = monotonic_s
        self._tagged = False
        self._last: dict[Partition, _LastTick] = {}
        #: Records replicated up to this time must come below the horizon.
        self._shown_ms = NEVER_MS
        self._begun = False
        self._ticked_s = -IDLE_EVERY_S
        self._followed: str | None = None
        self._followed_s = -FOLLOWED_FOR_S
        self._looked_s = -LOOK_EVERY_S
        self._since = -1
        #: With live streams: the offsets of the last step's ticks that directly follow the last replicated record.
        self.alone: Mapping[Partition, int] = {}

    async def step(self) -> float:
        """Append ticks if they are due and useful; return in how many seconds to call it again."""
        self.alone = {}
        followed = await self._is_followed()
        now_s = self._now_s()
        every_s = FOLLOWED_EVERY_S if followed else IDLE_EVERY_S
        left_s = self._ticked_s + every_s - now_s
        if left_s > FOLLOWED_EVERY_S / 2:
            return min(left_s, FOLLOWED_EVERY_S if followed else LOOK_EVERY_S)
        # With live streams a step that found nothing to tick does not postpone the next tick.
        ticks = await self._tick()
        if ticks or not followed:
            self._ticked_s, self._since = now_s, -1
        if followed:
            self.alone = {at: offset for at, offset in ticks.items() if self._last[at].alone}
        return FOLLOWED_EVERY_S if followed else LOOK_EVERY_S

    async def rest(self, wait_s: float) -> None:
        """Wait for `wait_s`; with live streams and a tick allowed, only until the store has changed."""
        if wait_s > FOLLOWED_EVERY_S or self._now_s() - self._ticked_s < FOLLOWED_EVERY_S / 2:
            await asyncio.sleep(wait_s)
            return
        await asyncio.sleep(LOOK_AGAIN_S)
        self._since = await self._store.wait_any(timeout_s=wait_s - LOOK_AGAIN_S, since=self._since)

    async def _is_followed(self) -> bool:
        now_s = self._now_s()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            found = await self._store.setting(FOLLOWED_SETTING)
            # The clocks of two machines are not compared: only a change of the value counts.
            if found is not None and found != self._followed:
                self._followed, self._followed_s = found, now_s
        return now_s - self._followed_s < FOLLOWED_FOR_S

    async def _tick(self) -> Mapping[Partition, int]:
        """Append the ticks that are useful; return their offsets."""
        self._tagged = self._tagged or await has_tags(self._store)
        if not self._tagged:
            return {}
        configs, pointers = await _read_progress(self._store, self._topics)
        if self._topics is not None and not self._begun:
            # The pipelines of the other topics may not have shared their times yet.
            self._shown_ms = (await read_horizon(self._store)).most_ms
        self._begun = True
        lagging: list[Partition] = []
        in_flight = set()
        for topic, config in configs.items():
            for partition in range(config.partitions):
                at, pointer = (topic, partition), pointers[topic].get(partition)
                last = self._last.get(at)
                if last is not None and (pointer is None or pointer.position < last.position):
                    in_flight.add(at)  # one tick is enough for a partition that is stuck
                elif pointer is not None and (last is None or not last.alone or pointer.position > last.position):
                    self._shown_ms = max(self._shown_ms, pointer.time_ms)
                    self._last[at] = _LastTick(pointer.position, True)
        if self._topics is not None:
            self._shown_ms = await share_shown(self._store, self._shown_ms)
        for topic, config in configs.items():
            for partition in range(config.partitions):
                at, pointer = (topic, partition), pointers[topic].get(partition)
                if at not in in_flight and (pointer is None or pointer.time_ms <= self._shown_ms):
                    lagging.append(at)
        ticks = await _append_ticks(self._log, configs, lagging, self._shown_ms + 1)
        for at, offset in ticks.items():
            pointer = pointers[at[0]].get(at[1])
            before = -1 if pointer is None else pointer.position.offset
            self._last[at] = _LastTick(Position(configs[at[0]].epoch, offset), alone=offset == before + 1)
        return ticks


async def share_shown(store: StoreWriter, shown_ms: int) -> int:
    """Share the greatest replicated time with the other pipelines; return the greatest time that any has shared."""
    shared_ms = NEVER_MS
    for _ in range(SHARE_TRIES_MAX):
        text = await store.setting(SHOWN_SETTING)
        shared_ms = NEVER_MS if text is None else int(text)
        if shared_ms >= shown_ms or await store.set_setting(SHOWN_SETTING, str(shown_ms), expected=text):
            break
    return max(shared_ms, shown_ms)  # after only lost races, the next tick shares it


async def has_tags(store: StoreWriter) -> bool:
    """Return whether any event was ever tagged."""
    async for _ in store.tags():
        return True
    return False


_Configs = Mapping[str, TopicConfig]
_Pointers = Mapping[str, Mapping[int, Pointer]]


async def _read_progress(store: StoreWriter, topics: Iterable[str] | None) -> tuple[_Configs, _Pointers]:
    found = await gather_by_topic(store.topic_config, list(topics or await store.topics()))
    configs = {topic: config for topic, config in found.items() if config is not None}
    return configs, await gather_by_topic(store.pointers, list(configs))


async def _append_ticks(
    log: Log, configs: _Configs, partitions: Sequence[Partition], time_ms: int
) -> dict[Partition, int]:
    """Append a tick with this time to each of the partitions; return the ticks' offsets."""
    values = {
        topic: encode_record(Mark(config.epoch, time_ms), limit_bytes=config.limit_bytes)
        for topic, config in configs.items()
    }
    sent = await asyncio.gather(*(log.append(Outgoing(*each, None, values[each[0]])) for each in partitions))
    return {each: done.offset for each, done in zip(partitions, sent, strict=True)}
