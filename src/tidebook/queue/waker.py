"""Wake a queue's listeners when an entry of any process becomes due, using polls, timers and notifications."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from datetime import datetime
from typing import Final

from tidebook.core.errors import TidebookError
from tidebook.queue.job import utc_datetime
from tidebook.queue.port import NEVER_MS, UPCOMING_MAX, Due, QueueRef, QueueStore, WakeRequest
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.futures import cancel_and_wait
from tidebook.runtime.metrics import Metrics

#: The first and the longest pause between polls, and between announcements of work that nobody claims. The first poll
#: after a sleep was published comes soon, because a concurrent put may not have seen the sleep yet.
FIRST_POLL_S: Final = 0.05
SLOW_POLL_S: Final = 5.0
_GROWTH: Final = 10.0
#: The interval at which the published sleep is refreshed.
HEARTBEAT_S: Final = 30.0
#: The maximum number of queues that one poll reads.
POLL_MAX: Final = 500
_RETRY_S: Final = 0.5
#: The longest time for which a timer is set; a later date needs several timers in turn.
_TIMER_S_MAX: Final = 3_600.0
#: A reading of the store's clock that is older than this is replaced by any newer one, even a less precise one.
_READING_S_MAX: Final = 30.0


class StoreClock:
    """Maps the store's dates to this process's monotonic clock, by the recent reading with the shortest round trip."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._error_s = float("inf")
        self._read_at = -_READING_S_MAX

    def observe(self, now_ms: int, asked_at: float) -> None:
        """Take a reading: the store answered `now_ms` to a request that was sent at `asked_at`."""
        answered_at = time.monotonic()
        error_s = answered_at - asked_at
        if error_s <= self._error_s or answered_at - self._read_at > _READING_S_MAX:
            self._offset_s = now_ms / 1000 - (asked_at + answered_at) / 2
            self._error_s = error_s
            self._read_at = answered_at

    def monotonic_at(self, date_ms: int) -> float:
        """Return the monotonic time at which the store's clock will show this date."""
        return date_ms / 1000 - self._offset_s

    def now_ms(self) -> int:
        """Return the estimated time of the store's clock."""
        return int((time.monotonic() + self._offset_s) * 1000)


class DueDates:
    """One queue that this process watches: its listeners, known due dates and timers, and its published sleep."""

    def __init__(self, ref: QueueRef) -> None:
        self.ref = ref
        self.listeners: set[asyncio.Event] = set()
        #: Process dates in the future, ascending.
        self.dates: list[int] = []
        #: Dates added since the last poll was sent, whose result may lack them.
        self.added: list[int] = []
        #: Whether the store may have later dates than these.
        self.has_later_dates = False
        #: Whether due entries wait for another entry of their key to be finished.
        self.waits_for_key = False
        #: Whether the queue is paused: then no put needs to wake this process.
        self.paused = False
        #: The published sleep: its end, and whether it waits for a held key; None if none is published.
        self.published_sleep: tuple[int, bool] | None = None
        #: The number of claims since the last wake-up that returned entries; if not 0, more entries may be due.
        self.claims = 0
        self.date_timer: asyncio.TimerHandle | None = None
        self.poll_timer: asyncio.TimerHandle | None = None
        self.announce_timer: asyncio.TimerHandle | None = None
        self._poll_backoff = Backoff(first_s=FIRST_POLL_S, max_s=SLOW_POLL_S, factor=_GROWTH)
        self._announce_backoff = Backoff(first_s=FIRST_POLL_S, max_s=SLOW_POLL_S, factor=_GROWTH)
        #: Whether ready work has not been announced yet.
        self._is_new = True

    def wake_listeners(self) -> None:
        self.claims = 0
        for listener in self.listeners:
            listener.set()

    def update(self, due: Due) -> None:
        """Replace the known dates by those that the store reported, plus those added since the poll was sent."""
        self.dates = sorted({*due.upcoming, *self.added})
        self.has_later_dates = len(due.upcoming) >= UPCOMING_MAX
        self.waits_for_key = due.held
        self.paused = due.paused

    def add_date(self, date_ms: int) -> None:
        self.added.append(date_ms)
        index = bisect_left(self.dates, date_ms)
        if index == len(self.dates) or self.dates[index] != date_ms:
            self.dates.insert(index, date_ms)

    def remove_past_dates(self, now_ms: int) -> None:
        while self.dates and self.dates[0] <= now_ms:
            del self.dates[0]

    def sleeps_until(self, lease_end: int) -> tuple[int, bool]:
        """Return the sleep to publish: a put that is due before this date must wake this process."""
        if self.paused:
            return 0, False
        return min(self.dates[0] if self.dates else NEVER_MS, lease_end), self.waits_for_key

    def reset_backoff(self) -> None:
        """Reset the pauses between polls and between announcements, because the queue has changed."""
        self._reset_announcing()
        self._poll_backoff.reset()

    def announce_delay_s(self) -> float:
        """Return how long to wait before announcing ready work; 0 if it is new, or if some of it was just claimed."""
        if self._is_new:
            self._is_new = False
            return 0.0
        delay_s = self._announce_backoff.next_s()
        return 0.0 if self.claims else delay_s

    def next_poll_s(self) -> float:
        """Return how long to sleep before the next poll."""
        self._reset_announcing()
        return self._poll_backoff.next_s()

    def _reset_announcing(self) -> None:
        self._is_new = True
        self._announce_backoff.reset()

    def cancel_timers(self) -> None:
        for timer in (self.date_timer, self.poll_timer, self.announce_timer):
            if timer is not None:
                timer.cancel()


class Waker:
    """Watches the queues that this process listens to. A poll of the store decides the state of each:

    ready   Entries are due: `_announce_ready` wakes the listeners, again after growing pauses if nobody claims.
    asleep  None are: `_fall_asleep` publishes until when, so that a put of another process that is due earlier
            notifies this one. The next process date, a notification or a poll after a growing pause ends the sleep.
    busy    The second claim in a row returned entries: `claimed` withdraws the published sleep, so that puts need not
            notify. An empty claim ends it with a poll (`_on_empty_claim`).
    """

    def __init__(self, store: QueueStore, sleeper: bytes, *, metrics: Metrics) -> None:
        self.clock = StoreClock()
        self._store = store
        self._sleeper = sleeper
        self._metrics = metrics
        self._watches: dict[int, DueDates] = {}
        self._poll_requests: dict[int, DueDates] = {}
        #: Queues whose published sleep must be withdrawn.
        self._to_withdraw: list[int] = []
        self._poll_requested = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def listen(self, ref: QueueRef) -> AsyncGenerator[datetime, None]:
        """Yield the store's time whenever work becomes due."""
        watch = self._watches.setdefault(ref.id, DueDates(ref))
        if not self._tasks:
            loops = (self._poll_loop(), self._receive_loop(), self._heartbeat_loop())
            self._tasks = [asyncio.create_task(loop) for loop in loops]
        event = asyncio.Event()
        watch.listeners.add(event)
        try:
            while True:
                self._request_poll(watch)
                await event.wait()
                if self._closed:
                    return
                event.clear()
                yield utc_datetime(self.clock.now_ms())
        finally:
            watch.listeners.discard(event)
            if not watch.listeners:
                await self._stop_watching(watch)

    def put(self, ref: QueueRef, at_ms: int, now_ms: int) -> None:
        """Wake listeners, now or at `at_ms`: this process put an entry, or was notified of one."""
        watch = self._watches.get(ref.id)
        if watch is None:
            return
        if at_ms <= now_ms:
            watch.reset_backoff()
            self._wake(watch)
        else:
            watch.add_date(at_ms)
            self._set_date_timer(watch)

    def claimed(self, ref: QueueRef, count: int) -> None:
        """Record a claim of this process; `count` is 0 if nothing was due."""
        watch = self._watches.get(ref.id)
        if watch is None:
            return
        if not count:
            self._on_empty_claim(watch)
            return
        watch.claims += 1
        if watch.claims == 2 and watch.published_sleep is not None:  # this process is busy: no notification needed
            watch.published_sleep = None
            self._to_withdraw.append(ref.id)
            self._poll_requested.set()

    def _on_empty_claim(self, watch: DueDates) -> None:
        # Poll, which also publishes the sleep again. An empty claim without a successful one before it is no reason to
        # poll: other processes may hold the entries, and polling would become a busy loop.
        if watch.claims and (watch.published_sleep is None or watch.announce_timer is not None):
            watch.claims = 0
            watch.reset_backoff()
            if watch.announce_timer is not None:
                watch.announce_timer.cancel()
                watch.announce_timer = None
            self._request_poll(watch)

    def key_released(self, ref: QueueRef) -> None:
        """Poll after an entry was finished or returned here, if a due entry waits for its key."""
        watch = self._watches.get(ref.id)
        if watch is not None and watch.waits_for_key:
            self._request_poll(watch)

    async def close(self) -> None:
        """Stop listening, and end all listeners."""
        self._closed = True
        for watch in self._watches.values():
            watch.cancel_timers()
            watch.wake_listeners()
        self._watches.clear()
        tasks, self._tasks = self._tasks, []
        await cancel_and_wait(*tasks)

    def _wake(self, watch: DueDates) -> None:
        self._metrics.count("queue_wakeups", queue=watch.ref.name)
        watch.wake_listeners()

    def _request_poll(self, watch: DueDates) -> None:
        self._poll_requests[watch.ref.id] = watch
        self._poll_requested.set()

    def _schedule_poll(self, watch: DueDates, when: float) -> None:
        watch.poll_timer = _reset_timer(watch.poll_timer, when, self._request_poll, watch)

    def _set_date_timer(self, watch: DueDates) -> None:
        when = self.clock.monotonic_at(watch.dates[0]) if watch.dates else None
        watch.date_timer = _reset_timer(watch.date_timer, when, self._date_reached, watch)

    def _date_reached(self, watch: DueDates) -> None:
        before = len(watch.dates)
        watch.remove_past_dates(self.clock.now_ms() + 1)  # the loop's timers may fire a fraction of a millisecond early
        if len(watch.dates) < before:
            watch.reset_backoff()
            self._wake(watch)
        if not watch.dates and watch.has_later_dates:
            self._request_poll(watch)
        self._set_date_timer(watch)

    async def _poll_loop(self) -> None:
        while True:
            await self._poll_requested.wait()
            self._poll_requested.clear()
            watches = [self._poll_requests.pop(id) for id in list(self._poll_requests)[:POLL_MAX]]
            watches = [watch for watch in watches if watch.listeners]
            if self._poll_requests:
                self._poll_requested.set()
            try:
                if awake := self._take_withdrawals():
                    await self._store.awake(self._sleeper, awake)
                if watches:
                    await self._poll(watches)
            except TidebookError:
                self._metrics.count("queue_due_date_failures")
                for watch in watches:
                    watch.published_sleep = None
                    self._schedule_poll(watch, time.monotonic() + _RETRY_S)

    def _take_withdrawals(self) -> list[int]:
        """Return the queues whose published sleep to withdraw, unless it was published again since."""
        awake, self._to_withdraw = self._to_withdraw, []
        return [id for id in awake if id not in self._watches or self._watches[id].published_sleep is None]

    async def _poll(self, watches: list[DueDates]) -> None:
        asked_at = time.monotonic()
        for watch in watches:
            watch.added.clear()
        dues = await self._store.due([watch.ref for watch in watches])
        self._metrics.count("queue_due_date_reads", len(watches))
        self.clock.observe(dues[0].now_ms, asked_at)
        sleeps = {}
        for watch, due in zip(watches, dues, strict=True):
            watch.update(due)
            self._set_date_timer(watch)
            if due.ready:
                self._announce_ready(watch)
            elif self._fall_asleep(watch, due.lease_end):
                sleeps[watch.ref.id] = watch.published_sleep or (NEVER_MS, False)
        if sleeps:
            await self._store.sleep(self._sleeper, sleeps)

    def _announce_ready(self, watch: DueDates) -> None:
        """Wake listeners for ready work: immediately, or after a pause if it was announced before."""
        self._schedule_poll(watch, time.monotonic() + SLOW_POLL_S)
        if watch.announce_timer is not None:
            return
        delay_s = watch.announce_delay_s()
        if delay_s == 0.0:
            self._wake(watch)
        else:
            watch.announce_timer = asyncio.get_running_loop().call_later(delay_s, self._announce_again, watch)

    def _announce_again(self, watch: DueDates) -> None:
        watch.announce_timer = None
        if watch.claims:  # some of it was claimed, perhaps all
            self._request_poll(watch)
        else:
            self._wake(watch)

    def _fall_asleep(self, watch: DueDates, lease_end: int) -> bool:
        """Schedule the next poll of a queue without ready work; return whether its sleep must be published."""
        asleep = watch.sleeps_until(lease_end)
        is_new = watch.published_sleep != asleep
        if is_new:
            watch.published_sleep = asleep
            watch.reset_backoff()
        poll_at = time.monotonic() + watch.next_poll_s()
        self._schedule_poll(watch, min(poll_at, self.clock.monotonic_at(lease_end) + 0.001))
        return is_new

    async def _receive_loop(self) -> None:
        while True:
            try:
                async for wake in self._store.wakes():
                    self._on_wake_request(wake)
            except TidebookError:
                self._metrics.count("queue_listen_failures")
            await asyncio.sleep(_RETRY_S)

    def _on_wake_request(self, wake: WakeRequest) -> None:
        if wake.queue == 0:
            for watch in self._watches.values():
                watch.published_sleep = None
                self._request_poll(watch)
            return
        woken = self._watches.get(wake.queue)
        if woken is None:
            return
        if wake.at is None:
            self._request_poll(woken)
        else:
            self.put(woken.ref, wake.at, self.clock.now_ms())

    async def _heartbeat_loop(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._store.still_asleep(self._sleeper)
            except TidebookError:
                self._metrics.count("queue_heartbeat_failures")

    async def _stop_watching(self, watch: DueDates) -> None:
        watch.cancel_timers()
        self._poll_requests.pop(watch.ref.id, None)
        if self._watches.get(watch.ref.id) is watch:
            del self._watches[watch.ref.id]
            if watch.published_sleep is not None:
                with suppress(TidebookError):  # the published sleep expires anyway
                    await self._store.awake(self._sleeper, [watch.ref.id])


def _reset_timer(
    timer: asyncio.TimerHandle | None, when: float | None, call: Callable[[DueDates], None], watch: DueDates
) -> asyncio.TimerHandle | None:
    """Cancel a timer and return a new one; None if `when` is None."""
    if timer is not None:
        timer.cancel()
    if when is None:
        return None
    loop = asyncio.get_running_loop()
    return loop.call_at(min(when, loop.time() + _TIMER_S_MAX), call, watch)
