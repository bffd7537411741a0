"""Wake-ups: when work becomes due, whoever put it and whenever. One connection, and the loop's own timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from datetime import datetime
from typing import Any, Final

from tidebook.core.errors import TidebookError
from tidebook.core.metrics import Metrics
from tidebook.queue.ending import end
from tidebook.queue.job import date
from tidebook.queue.store_clock import StoreClock
from tidebook.queue.watch import SLOW_POLL_S, Watch
from tidebook.sql.port.queue import NEVER_MS, QueueRef, QueueStore, Wake

BEAT_S: Final = 30.0
LOOK_MAX: Final = 500
_RETRY_S: Final = 0.5
_TIMER_S_MAX: Final = 3_600.0


class Waker:
    """Watches the queues that this process listens to."""

    def __init__(self, store: QueueStore, sleeper: bytes, *, metrics: Metrics) -> None:
        self.clock = StoreClock()
        self._store = store
        self._sleeper = sleeper
        self._metrics = metrics
        self._watches: dict[int, Watch] = {}
        self._to_look: dict[int, Watch] = {}
        self._awake: list[int] = []
        self._asked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def listen(self, ref: QueueRef) -> AsyncGenerator[datetime, None]:
        """The store's time whenever work becomes due."""
        watch = self._watches.get(ref.id)
        if watch is None:
            watch = self._watches[ref.id] = Watch(ref)
        if not self._tasks:
            self._tasks = [self._task(self._look()), self._task(self._hear()), self._task(self._beat())]
        event = asyncio.Event()
        watch.listeners.add(event)
        try:
            while True:
                self._look_soon(watch)
                await event.wait()
                if self._closed:
                    return
                event.clear()
                yield date(self.clock.now_ms())
        finally:
            watch.listeners.discard(event)
            if not watch.listeners:
                await self._forget(watch)

    def put(self, ref: QueueRef, at_ms: int, now_ms: int) -> None:
        """Something was put that becomes due then."""
        watch = self._watches.get(ref.id)
        if watch is None:
            return
        if at_ms <= now_ms:
            watch.news()
            self._fire(watch)
        else:
            watch.add_date(at_ms)
            self._set_date_timer(watch)

    def claimed(self, ref: QueueRef, count: int) -> None:
        """Entries were claimed here; none, where nothing was due."""
        watch = self._watches.get(ref.id)
        if watch is None:
            return
        if not count:
            self._drained(watch)
            return
        watch.claims += 1
        if watch.claims == 2 and watch.said is not None:  # busy: putters need not tell it anything
            watch.said = None
            self._awake.append(ref.id)
            self._asked.set()

    def _drained(self, watch: Watch) -> None:
        """Whoever took a part has come to the end: putters are to be told again that this process sleeps.

        Without a claim before it that is no news: others may hold what is ready, and would be asked in a loop.
        """
        if watch.claims and (watch.said is None or watch.again_timer is not None):
            watch.claims = 0
            watch.news()
            if watch.again_timer is not None:
                watch.again_timer.cancel()
                watch.again_timer = None
            self._look_soon(watch)

    def freed(self, ref: QueueRef) -> None:
        """An entry was finished or given back here: one that waited for its key may be ready."""
        watch = self._watches.get(ref.id)
        if watch is not None and watch.held:
            self._look_soon(watch)

    async def close(self) -> None:
        """Stop listening: whoever listens has come to the end."""
        self._closed = True
        for watch in self._watches.values():
            watch.cancel()
            watch.fire()
        self._watches.clear()
        tasks, self._tasks = self._tasks, []
        await end(*tasks)

    def _task(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(body)

    def _fire(self, watch: Watch) -> None:
        self._metrics.count("queue_wakeups", queue=watch.ref.name)
        watch.fire()

    def _look_soon(self, watch: Watch) -> None:
        self._to_look[watch.ref.id] = watch
        self._asked.set()

    def _look_at(self, watch: Watch, moment: float) -> None:
        if watch.look_timer is not None:
            watch.look_timer.cancel()
        loop = asyncio.get_running_loop()
        watch.look_timer = loop.call_at(min(moment, loop.time() + _TIMER_S_MAX), self._look_soon, watch)

    def _set_date_timer(self, watch: Watch) -> None:
        if watch.date_timer is not None:
            watch.date_timer.cancel()
            watch.date_timer = None
        if watch.dates:
            loop = asyncio.get_running_loop()
            moment = min(self.clock.moment(watch.dates[0]), loop.time() + _TIMER_S_MAX)
            watch.date_timer = loop.call_at(moment, self._date_reached, watch)

    def _date_reached(self, watch: Watch) -> None:
        before = len(watch.dates)
        watch.pass_dates(self.clock.now_ms() + 1)  # the loop's timers may be early by a part of a millisecond
        if len(watch.dates) < before:
            watch.news()
            self._fire(watch)
        if not watch.dates and watch.more:
            self._look_soon(watch)
        self._set_date_timer(watch)

    async def _look(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            watches = [self._to_look.pop(id) for id in list(self._to_look)[:LOOK_MAX]]
            watches = [watch for watch in watches if watch.listeners]
            if self._to_look:
                self._asked.set()
            try:
                if awake := self._no_more_asleep():
                    await self._store.awake(self._sleeper, awake)
                if watches:
                    await self._look_for(watches)
            except TidebookError:
                self._metrics.count("queue_look_failures")
                for watch in watches:
                    watch.said = None
                    self._look_at(watch, time.monotonic() + _RETRY_S)

    def _no_more_asleep(self) -> list[int]:
        """The queues to take back what was said of, where it was not said again since."""
        awake, self._awake = self._awake, []
        return [id for id in awake if id not in self._watches or self._watches[id].said is None]

    async def _look_for(self, watches: list[Watch]) -> None:
        asked_at = time.monotonic()
        dues = await self._store.due([watch.ref for watch in watches])
        self._metrics.count("queue_looks", len(watches))
        self.clock.note(dues[0].now_ms, asked_at)
        said = {}
        for watch, due in zip(watches, dues, strict=True):
            watch.learn(due)
            self._set_date_timer(watch)
            if due.ready:
                self._tell(watch)
            elif self._rest(watch, due.lease_end):
                said[watch.ref.id] = watch.said or (NEVER_MS, False)
        if said:
            await self._store.sleep(self._sleeper, said)

    def _tell(self, watch: Watch) -> None:
        """Work is ready."""
        self._look_at(watch, time.monotonic() + SLOW_POLL_S)
        if watch.again_timer is not None:
            return
        wait_s = watch.again_s()
        if wait_s == 0.0:
            self._fire(watch)
        else:
            watch.again_timer = asyncio.get_running_loop().call_later(wait_s, self._tell_again, watch)

    def _tell_again(self, watch: Watch) -> None:
        watch.again_timer = None
        if watch.claims:  # somebody has taken some, perhaps all of it
            self._look_soon(watch)
        else:
            self._fire(watch)

    def _rest(self, watch: Watch, lease_end: int) -> bool:
        """Nothing is ready; whether putters have to be told until when it sleeps."""
        asleep = watch.sleeps_until(lease_end)
        told = watch.said != asleep
        if told:
            watch.said = asleep
            watch.news()
        poll_at = time.monotonic() + watch.next_poll_s()
        self._look_at(watch, min(poll_at, self.clock.moment(lease_end) + 0.001))
        return told

    async def _hear(self) -> None:
        while True:
            try:
                async for wake in self._store.wakes():
                    self._woken(wake)
            except TidebookError:
                self._metrics.count("queue_listen_failures")
            await asyncio.sleep(_RETRY_S)

    def _woken(self, wake: Wake) -> None:
        if wake.queue == 0:
            for watch in self._watches.values():
                watch.said = None
                self._look_soon(watch)
            return
        found = self._watches.get(wake.queue)
        if found is None:
            return
        if wake.at is None:
            self._look_soon(found)
        else:
            self.put(found.ref, wake.at, self.clock.now_ms())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self._store.still_asleep(self._sleeper)
            except TidebookError:
                self._metrics.count("queue_beat_failures")

    async def _forget(self, watch: Watch) -> None:
        watch.cancel()
        self._to_look.pop(watch.ref.id, None)
        if self._watches.get(watch.ref.id) is watch:
            del self._watches[watch.ref.id]
            if watch.said is not None:
                try:
                    await self._store.awake(self._sleeper, [watch.ref.id])
                except TidebookError:  # it is forgotten by itself after a while
                    pass
