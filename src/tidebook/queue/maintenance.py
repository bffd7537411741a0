"""Periodic maintenance: expire leases and entries, rotate partitions, announce dead letters."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from tidebook.core.errors import TidebookError
from tidebook.queue.hooks import Announce
from tidebook.queue.port import QueueRef, QueueStore
from tidebook.queue.waker import StoreClock
from tidebook.runtime.futures import cancel_and_wait
from tidebook.runtime.metrics import Metrics

#: A queue is swept when its next date is due, after at most and at least this time.
SWEEP_S_MAX: Final = 15.0
SWEEP_S_LEAST: Final = 0.05
#: After this many finished entries the queue is swept, so that its partitions are rotated.
FINISHED_MAX: Final = 5_000
_RETRY_S: Final = 1.0
#: How long `close` waits for hooks that are running.
ANNOUNCE_S_MAX: Final = 12.0


class QueueMaintenance:
    """Sweeps the queues that this process uses, each when its next date is due."""

    def __init__(self, store: QueueStore, clock: StoreClock, announce: Announce, *, metrics: Metrics) -> None:
        self._store = store
        self._clock = clock
        self._announce = announce
        self._metrics = metrics
        self._next_sweep_at: dict[int, float] = {}
        self._refs: dict[int, QueueRef] = {}
        self._finished: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._unannounced = False
        self._closed = False

    def schedule(self, ref: QueueRef, within_s: float = SWEEP_S_MAX) -> None:
        """Sweep this queue regularly, the next time within `within_s`."""
        due_at = time.monotonic() + max(within_s, SWEEP_S_LEAST)
        self._refs[ref.id] = ref
        if due_at < self._next_sweep_at.get(ref.id, float("inf")):
            self._next_sweep_at[ref.id] = due_at
            self._changed.set()
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run())

    def dead_lettered(self, ref: QueueRef) -> None:
        """Announce a dead letter that this process made, at the latest on close."""
        self._unannounced = True
        self.schedule(ref, 0.0)

    def finished(self, ref: QueueRef, count: int) -> None:
        """Count finished entries: after FINISHED_MAX of them, sweep the queue to rotate its partitions."""
        total = self._finished.get(ref.id, 0) + count
        if total >= FINISHED_MAX:
            total = 0
            self.schedule(ref, 0.0)
        self._finished[ref.id] = total

    async def close(self) -> None:
        """Stop sweeping, and announce the remaining dead letters."""
        self._closed = True
        await cancel_and_wait(self._task)
        if self._unannounced:  # no later sweep will announce it
            self._start_announcing()
        if self._announcing is not None:
            await asyncio.wait([self._announcing], timeout=ANNOUNCE_S_MAX)
            await cancel_and_wait(self._announcing)
            self._announcing = None

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            for id in [id for id, due_at in self._next_sweep_at.items() if due_at <= now]:
                await self._sweep(self._refs[id])
            pause_s = min(self._next_sweep_at.values()) - time.monotonic()
            with suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it loses a cancellation that arrives together with the event.
                async with asyncio.timeout(max(pause_s, 0.0)):
                    await self._changed.wait()

    async def _sweep(self, ref: QueueRef) -> None:
        asked_at = time.monotonic()
        self._next_sweep_at[ref.id] = asked_at + SWEEP_S_MAX
        try:
            swept = await self._store.sweep(ref)
        except TidebookError:
            self._metrics.count("queue_sweep_failures")
            self._next_sweep_at[ref.id] = asked_at + _RETRY_S
            return
        self._clock.observe(swept.now_ms, asked_at)
        self._metrics.count("queue_expired", swept.expired, queue=ref.name)
        self._metrics.count("queue_leases_expired", swept.leases_expired, queue=ref.name)
        self._metrics.count("queue_dead", swept.dead, queue=ref.name)
        due_at = max(self._clock.monotonic_at(swept.next_at), time.monotonic() + SWEEP_S_LEAST)
        self._next_sweep_at[ref.id] = min(self._next_sweep_at[ref.id], due_at)
        self._start_announcing()

    def _start_announcing(self) -> None:
        if self._announcing is None or self._announcing.done():  # concurrently with the sweeps: a hook may be slow
            self._announcing = asyncio.create_task(self._announce_now())

    async def _announce_now(self) -> None:
        self._unannounced = False
        try:
            await self._announce()
        except TidebookError:
            self._metrics.count("queue_announce_failures")
