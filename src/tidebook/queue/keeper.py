"""The timer's work: leases that ran out, entries that expired, periods that ended, flags that nobody was told of."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from tidebook.core.errors import TidebookError
from tidebook.core.metrics import Metrics
from tidebook.queue.ending import end
from tidebook.queue.hooks import Announce
from tidebook.queue.store_clock import StoreClock
from tidebook.sql.port.queue import QueueRef, QueueStore

#: A queue is swept at its next date, but never later than this, and never sooner than that.
SWEEP_S_MAX: Final = 15.0
SWEEP_S_LEAST: Final = 0.05
#: After this many finished entries the period tables are looked at.
FINISHED_MAX: Final = 5_000
_RETRY_S: Final = 1.0
#: How long an end waits for hooks that are being told.
TELL_S_MAX: Final = 12.0


class Keeper:
    """Sweeps the queues that this process works with."""

    def __init__(self, store: QueueStore, clock: StoreClock, announce: Announce, *, metrics: Metrics) -> None:
        self._store = store
        self._clock = clock
        self._announce = announce
        self._metrics = metrics
        self._next: dict[int, float] = {}
        self._refs: dict[int, QueueRef] = {}
        self._finished: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._untold = False

    def keep(self, ref: QueueRef, within_s: float = SWEEP_S_MAX) -> None:
        """Sweep this queue from now on, the next time within `within_s`."""
        moment = time.monotonic() + max(within_s, SWEEP_S_LEAST)
        self._refs[ref.id] = ref
        if moment < self._next.get(ref.id, float("inf")):
            self._next[ref.id] = moment
            self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def died(self, ref: QueueRef) -> None:
        """A dead letter was made here: somebody is to be told, at the latest when this ends."""
        self._untold = True
        self.keep(ref, 0.0)

    def finished(self, ref: QueueRef, count: int) -> None:
        """Count what was finished here: many of them end a period."""
        total = self._finished.get(ref.id, 0) + count
        if total >= FINISHED_MAX:
            total = 0
            self.keep(ref, 0.0)
        self._finished[ref.id] = total

    async def close(self) -> None:
        """Stop."""
        await end(self._task)
        self._task = None
        if self._untold:  # it may be the last one here
            self._tell_soon()
        if self._telling is not None:
            await asyncio.wait([self._telling], timeout=TELL_S_MAX)
            await end(self._telling)
            self._telling = None

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            for id in [id for id, moment in self._next.items() if moment <= now]:
                await self._sweep(self._refs[id])
            pause_s = min(self._next.values()) - time.monotonic()
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that comes together with news.
                async with asyncio.timeout(max(pause_s, 0.0)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _sweep(self, ref: QueueRef) -> None:
        asked_at = time.monotonic()
        self._next[ref.id] = asked_at + SWEEP_S_MAX
        try:
            swept = await self._store.sweep(ref)
        except TidebookError:
            self._metrics.count("queue_sweep_failures")
            self._next[ref.id] = asked_at + _RETRY_S
            return
        self._clock.note(swept.now_ms, asked_at)
        for name, count in (("expired", swept.expired), ("run_out", swept.run_out), ("dead", swept.dead)):
            if count:
                self._metrics.count(f"queue_{name}", count, queue=ref.name)
        moment = max(self._clock.moment(swept.next_at), time.monotonic() + SWEEP_S_LEAST)
        self._next[ref.id] = min(self._next[ref.id], moment)
        self._tell_soon()

    def _tell_soon(self) -> None:
        if self._telling is None or self._telling.done():  # beside the sweeps: a hook may take its time
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        self._untold = False
        try:
            await self._announce()
        except TidebookError:
            self._metrics.count("queue_announce_failures")
