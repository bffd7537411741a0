"""Simulated threads for blocking code: each is a greenlet, and the clock jumps to the next one that is due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

#: A run with more steps than this is considered endless.
STEPS_MAX = 200_000


class SimulatedProcess:
    """A process, whose threads are paused or stopped together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.paused_until_s = 0.0
        self.dead = False


class SimulatedThread(greenlet):  # type: ignore[misc]
    """A thread of a process."""

    def __init__(self, process: SimulatedProcess, run: Callable[[], Any]) -> None:
        super().__init__(run)
        self.process = process


class ThreadScheduler:
    """Runs one thread at a time, in the order of their wake-up times; equal times keep the order of the calls.

    Threads switch only inside `sleep`, which every simulated call makes: the program, and not the machine, decides
    how threads interleave.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._hub = getcurrent()
        self._due: list[tuple[float, int, SimulatedThread | Callable[[], None]]] = []
        self._count = self._steps = 0
        #: The time at which the current call of `run` ends.
        self._until_s = 0.0
        self._threads: list[SimulatedThread] = []
        self._is_over = False

    def start(self, process: SimulatedProcess, run: Callable[[], Any]) -> None:
        """Start a thread."""
        thread = SimulatedThread(process, run)
        thread.parent = self._hub
        self._threads.append(thread)
        self._wake(self.now_s, thread)

    def call_at(self, when_s: float, act: Callable[[], None]) -> None:
        """Call a function at this time, outside all threads."""
        self._wake(max(when_s, self.now_s), act)

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait, longer if its process is paused; a thread of a dead process never continues."""
        thread = getcurrent()
        assert isinstance(thread, SimulatedThread)
        process = thread.process
        if self._is_over or process.dead:
            raise GreenletExit  # clean-up code of a dead process has no effect
        wakes_s = self.now_s + seconds
        if process.paused_until_s <= wakes_s <= self._until_s and (not self._due or wakes_s < self._due[0][0]):
            self._count_step()
            self.now_s = wakes_s  # nothing else is due before
            return
        self._wake(wakes_s, thread)
        self._hub.switch()
        if process.dead:
            raise GreenletExit

    def run(self, until_s: float) -> None:
        """Run until this time."""
        self._steps, self._until_s = 0, until_s
        while self._due and self._due[0][0] <= until_s:
            self._count_step()
            when_s, _, what = heapq.heappop(self._due)
            self.now_s = max(self.now_s, when_s)
            if not isinstance(what, SimulatedThread):
                what()
            elif not what.process.dead:
                if what.process.paused_until_s > self.now_s:
                    self._wake(what.process.paused_until_s, what)
                else:
                    what.switch()
        self.now_s = max(self.now_s, until_s)

    def close(self) -> None:
        """End all threads."""
        self._is_over = True
        for thread in self._threads:
            if thread:
                thread.throw(GreenletExit)

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise RuntimeError("the run does not end")

    def _wake(self, when_s: float, what: SimulatedThread | Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (when_s, self._count, what))
