"""Ticks: marks that move the time of idle partitions on, so that they do not hold the horizon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from tidebook.core.action import Mark
from tidebook.core.clock import Clock
from tidebook.core.record import encode_record
from tidebook.core.replication import Pointer
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Log, Outgoing
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import NEVER_MS

#: A follower renews it; while it changes, ticks come often.
FOLLOWED_SETTING = "tags/followed"
RENEW_S = 3.0
FOLLOWED_FOR_S = 10.0
FOLLOWED_EVERY_S = 0.1
IDLE_EVERY_S = 5.0
#: How often an idle ticker looks whether somebody follows.
LOOK_EVERY_S = 1.0

Partition = tuple[str, int]


async def tick(log: Log, store: StoreWriter, topics: Iterable[str] | None = None) -> int:
    """Write to every partition that is behind a tick just above the greatest time seen; returns how many.

    Once they are replicated, everything that was in the store before is below the horizon.
    """
    return len(await _write_ticks(log, *await _look(store, topics)))


class Ticker:
    """Ticks again and again, but only where a tick can bring something below the horizon."""

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
        self._last: dict[Partition, int] = {}
        self._ticked_s = -IDLE_EVERY_S
        self._followed: str | None = None
        self._followed_s = -FOLLOWED_FOR_S
        self._looked_s = -LOOK_EVERY_S

    async def step(self) -> float:
        """Tick if it is time and of use; returns in how many seconds to come again."""
        followed = await self._is_followed()
        every_s = FOLLOWED_EVERY_S if followed else IDLE_EVERY_S
        now_s = self._now_s()
        if now_s - self._ticked_s >= every_s - FOLLOWED_EVERY_S / 2:
            self._ticked_s = now_s
            await self._tick()
        return FOLLOWED_EVERY_S if followed else LOOK_EVERY_S

    async def _is_followed(self) -> bool:
        now_s = self._now_s()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            found = await self._store.setting(FOLLOWED_SETTING)
            # The clocks of two machines are not compared: that it changes is what counts.
            if found is not None and found != self._followed:
                self._followed, self._followed_s = found, now_s
        return now_s - self._followed_s < FOLLOWED_FOR_S

    async def _tick(self) -> None:
        self._tagged = self._tagged or await has_tags(self._store)
        if not self._tagged:
            return
        facts, pointers = await _look(self._store, self._topics)
        at = {
            (topic, partition): pointer.position.offset
            for topic, of in pointers.items()
            for partition, pointer in of.items()
        }
        waiting = any(at.get(each, -1) < offset for each, offset in self._last.items() if each[0] in facts)
        if waiting or (self._last and at == self._last):
            return  # the ticks before are still on their way, or nothing has come behind them
        self._last = await _write_ticks(self._log, facts, pointers)


async def has_tags(store: StoreWriter) -> bool:
    """Whether any event was ever tagged."""
    async for _ in store.tags():
        return True
    return False


class Following:
    """Tells the pipeline that somebody follows, every few seconds."""

    def __init__(self, store: StoreWriter, clock: Clock, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._now_s = monotonic_s
        self._told_s = -RENEW_S

    async def renew(self) -> None:
        """Tell it, unless it was told just now. Where two followers collide, one of them has told it."""
        now_s = self._now_s()
        if now_s - self._told_s < RENEW_S:
            return
        self._told_s = now_s
        before = await self._store.setting(FOLLOWED_SETTING)
        value = str(self._clock.now_ms())
        if value != before:
            await self._store.set_setting(FOLLOWED_SETTING, value, expected=before)


_Facts = Mapping[str, TopicFacts]
_Pointers = Mapping[str, Mapping[int, Pointer]]


async def _look(store: StoreWriter, topics: Iterable[str] | None) -> tuple[_Facts, _Pointers]:
    known = {topic: await store.facts(topic) for topic in (topics or await store.topics())}
    facts = {topic: each for topic, each in known.items() if each is not None}
    return facts, {topic: await store.pointers(topic) for topic in facts}


async def _write_ticks(log: Log, facts: _Facts, pointers: _Pointers) -> dict[Partition, int]:
    """A tick to every partition that is behind; the offsets they were given."""
    most_ms = max((each.time_ms for of in pointers.values() for each in of.values()), default=NEVER_MS)
    records = []
    for topic, known in facts.items():
        value = encode_record(Mark(known.epoch, most_ms + 1), limit_bytes=known.limit_bytes)
        for partition in range(known.partitions):
            pointer = pointers[topic].get(partition)
            if pointer is None or pointer.time_ms <= most_ms:
                records.append(Outgoing(topic, partition, None, value))
    sent = await asyncio.gather(*(log.append(record) for record in records))
    return {(record.topic, record.partition): each.offset for record, each in zip(records, sent, strict=True)}
