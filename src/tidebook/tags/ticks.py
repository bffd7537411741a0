"""Ticks: marks that move the time of idle partitions on, so that they do not hold the horizon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from tidebook.core.action import Mark
from tidebook.core.clock import Clock
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication import Pointer
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Log, Outgoing
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import NEVER_MS, asked_of_each, read_horizon

#: A follower renews it; while it changes, ticks come often.
FOLLOWED_SETTING = "tags/followed"
#: Through which time replicated records are to come below the horizon, where several pipelines share the topics.
SHOWN_SETTING = "tags/shown"
SHARE_TRIES_MAX = 5
RENEW_S = 3.0
FOLLOWED_FOR_S = 10.0
FOLLOWED_EVERY_S = 0.1
#: How soon a followed ticker looks again that found nothing to tick.
LOOK_AGAIN_S = 0.01
IDLE_EVERY_S = 5.0
#: How often an idle ticker looks whether somebody follows.
LOOK_EVERY_S = 1.0

Partition = tuple[str, int]


async def tick(
    log: Log, store: StoreWriter, topics: Iterable[str] | None = None, *, seen_ms: int = NEVER_MS
) -> dict[Partition, int]:
    """Write to every partition that is behind a tick just above the greatest time seen; returns their offsets.

    Once they are replicated, everything that was in the store before is below the horizon: of these topics, and up to
    `seen_ms`, the greatest time that others have reached.
    """
    facts, pointers = await _look(store, topics)
    most_ms = max((each.time_ms for of in pointers.values() for each in of.values()), default=NEVER_MS)
    most_ms = max(most_ms, seen_ms)
    behind = [
        (topic, partition)
        for topic, known in facts.items()
        for partition in range(known.partitions)
        if (pointer := pointers[topic].get(partition)) is None or pointer.time_ms <= most_ms
    ]
    return await _write_ticks(log, facts, behind, most_ms + 1)


class _Ticked(msgspec.Struct, frozen=True):
    """Where a partition's last tick lies, and whether it lies right behind what was replicated when it was sent."""

    position: Position
    alone: bool


class Ticker:
    """Ticks again and again, but only where a tick can bring something below the horizon.

    It writes to its own topics alone. What they are to reach is decided by all: a pipeline for each topic tells the
    others through a setting how far its records came. Pointers would not do for that: ticks move them as well, and
    two tickers would answer one another for ever.
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
        self._last: dict[Partition, _Ticked] = {}
        #: What was replicated up to this time is to come below the horizon.
        self._shown_ms = NEVER_MS
        self._begun = False
        self._ticked_s = -IDLE_EVERY_S
        self._followed: str | None = None
        self._followed_s = -FOLLOWED_FOR_S
        self._looked_s = -LOOK_EVERY_S
        self._since = -1
        #: Offsets of the last step's ticks that lie right behind what was replicated, where somebody follows.
        self.alone: Mapping[Partition, int] = {}

    async def step(self) -> float:
        """Tick if it is time and of use; returns in how many seconds to come again."""
        self.alone = {}
        followed = await self._is_followed()
        now_s = self._now_s()
        every_s = FOLLOWED_EVERY_S if followed else IDLE_EVERY_S
        left_s = self._ticked_s + every_s - now_s
        if left_s > FOLLOWED_EVERY_S / 2:
            return min(left_s, FOLLOWED_EVERY_S if followed else LOOK_EVERY_S)
        # Who is followed ticks right behind what was replicated; that there was nothing to tick puts nothing off.
        ticks = await self._tick()
        if ticks or not followed:
            self._ticked_s, self._since = now_s, -1
        if followed:
            self.alone = {at: offset for at, offset in ticks.items() if self._last[at].alone}
        return FOLLOWED_EVERY_S if followed else LOOK_EVERY_S

    async def rest(self, wait_s: float) -> None:
        """Wait for so long; where somebody follows and a tick may be sent, only until something was replicated."""
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
            # The clocks of two machines are not compared: that it changes is what counts.
            if found is not None and found != self._followed:
                self._followed, self._followed_s = found, now_s
        return now_s - self._followed_s < FOLLOWED_FOR_S

    async def _tick(self) -> Mapping[Partition, int]:
        """Write what ticks are of use; their offsets."""
        self._tagged = self._tagged or await has_tags(self._store)
        if not self._tagged:
            return {}
        facts, pointers = await _look(self._store, self._topics)
        if self._topics is not None and not self._begun:
            self._shown_ms = (
                await read_horizon(self._store)
            ).most_ms  # whoever replicates the rest may have told nobody
        self._begun = True
        behind: list[Partition] = []
        on_their_way = set()
        for topic, known in facts.items():
            for partition in range(known.partitions):
                at, pointer = (topic, partition), pointers[topic].get(partition)
                ticked = self._last.get(at)
                if ticked is not None and (pointer is None or pointer.position < ticked.position):
                    on_their_way.add(at)  # a stuck partition is not ticked again and again
                elif pointer is not None and (ticked is None or not ticked.alone or pointer.position > ticked.position):
                    self._shown_ms = max(self._shown_ms, pointer.time_ms)
                    self._last[at] = _Ticked(pointer.position, True)
        if self._topics is not None:
            self._shown_ms = await share_shown(self._store, self._shown_ms)
        for topic, known in facts.items():
            for partition in range(known.partitions):
                at, pointer = (topic, partition), pointers[topic].get(partition)
                if at not in on_their_way and (pointer is None or pointer.time_ms <= self._shown_ms):
                    behind.append(at)
        ticks = await _write_ticks(self._log, facts, behind, self._shown_ms + 1)
        for at, offset in ticks.items():
            pointer = pointers[at[0]].get(at[1])
            before = -1 if pointer is None else pointer.position.offset
            self._last[at] = _Ticked(Position(facts[at[0]].epoch, offset), alone=offset == before + 1)
        return ticks


async def share_shown(store: StoreWriter, shown_ms: int) -> int:
    """Tell other pipelines through which time records were replicated; the greatest time that any of them told."""
    told_ms = NEVER_MS
    for _ in range(SHARE_TRIES_MAX):
        text = await store.setting(SHOWN_SETTING)
        told_ms = NEVER_MS if text is None else int(text)
        if told_ms >= shown_ms or await store.set_setting(SHOWN_SETTING, str(shown_ms), expected=text):
            break
    return max(told_ms, shown_ms)  # where others were quicker each time, the next tick tells it


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
        """Tell it, unless it was told just now. Where two followers collide, one of them has told it.

        It is a hint: a store that cannot take it now may still be read.
        """
        now_s = self._now_s()
        if now_s - self._told_s < RENEW_S:
            return
        self._told_s = now_s
        with suppress(Unavailable, OutcomeUnknown):
            before = await self._store.setting(FOLLOWED_SETTING)
            value = str(self._clock.now_ms())
            if value != before:
                await self._store.set_setting(FOLLOWED_SETTING, value, expected=before)


_Facts = Mapping[str, TopicFacts]
_Pointers = Mapping[str, Mapping[int, Pointer]]


async def _look(store: StoreWriter, topics: Iterable[str] | None) -> tuple[_Facts, _Pointers]:
    known = await asked_of_each(store.facts, list(topics or await store.topics()))
    facts = {topic: each for topic, each in known.items() if each is not None}
    return facts, await asked_of_each(store.pointers, list(facts))


async def _write_ticks(log: Log, facts: _Facts, behind: Sequence[Partition], time_ms: int) -> dict[Partition, int]:
    """A tick to each of these partitions; the offsets they were given."""
    values = {
        topic: encode_record(Mark(known.epoch, time_ms), limit_bytes=known.limit_bytes)
        for topic, known in facts.items()
    }
    sent = await asyncio.gather(*(log.append(Outgoing(*each, None, values[each[0]])) for each in behind))
    return {each: done.offset for each, done in zip(behind, sent, strict=True)}
