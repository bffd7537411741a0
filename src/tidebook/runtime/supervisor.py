"""Run several long-running parts of a program side by side: restart and report those that fail, drain at the end.

A part is anything with `async def run()`, or a coroutine function without arguments. Four more members are optional:

- `name`: its name in the status.
- `def stop()`: asks a running `run` to finish what it has begun and return; without it, `run` is cancelled.
- `async def settle()`: returns once everything that the part could process when it was called has been processed.
- `problem`: why the part cannot do all of its work although it runs, such as a stopped slice; None if it can.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.clock import Clock
from tidebook.runtime.futures import cancel_and_wait
from tidebook.runtime.metrics import Metrics

LOGGER = logging.getLogger("tidebook.running")

#: The first and the longest pause before a failed part is restarted. The pause doubles with each failure, and begins
#: with the first one again if the part has run for at least RESTART_MAX_S.
RESTART_FIRST_S: Final = 0.2
RESTART_MAX_S: Final = 30.0
#: How long a drain waits for work in progress.
GRACE_S: Final = 30.0
ERROR_CHARS_MAX: Final = 500
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@runtime_checkable
class Stoppable(Protocol):
    """A part that finishes what it has begun before `run` returns."""

    def stop(self) -> None:
        """Ask `run` to return; a second call asks it to return at once."""
        ...


@runtime_checkable
class Settles(Protocol):
    """A part that can report when it has processed everything."""

    async def settle(self) -> None:
        """Return once all work that existed at the call has been processed; raise the error that prevents it."""
        ...


#: `restarting`: it failed, and is restarted after a pause. `ended`: its `run` has returned. `failed`: it raised
#: something other than an `Exception`, such as SystemExit, and is not restarted. `stopped`: by a drain.
RunState = Literal["starting", "running", "restarting", "ended", "failed", "stopped"]


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one supervised part."""

    name: str
    state: RunState
    #: When it entered this state.
    since: datetime
    #: How often it has failed, and its last error.
    failures: int = 0
    last_error: str | None = None
    #: Why it cannot do its work; None if it can.
    problem: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether it runs and can do its work, or has ended without an error."""
        return self.problem is None


class Supervisor:
    """Runs its parts within an `async with` block: `async with Supervisor([feed, worker], …) as running`."""

    def __init__(
        self, parts: Sequence[object], *, clock: Clock, metrics: Metrics | None = None, grace_s: float = GRACE_S
    ) -> None:
        self._clock = clock
        self._metrics = metrics or Metrics()
        self._grace_s = grace_s
        names: dict[str, int] = {}
        self._parts = [_Part(part, clock, names) for part in parts]
        self._stopping = False

    async def __aenter__(self) -> Supervisor:
        for part in self._parts:
            part.task = asyncio.create_task(self._supervise(part), name=f"tidebook-running {part.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drain()

    def status(self) -> list[RunStatus]:
        """Return the state of each part, in the order in which they were given."""
        return [part.status() for part in self._parts]

    async def until_stopped(self) -> None:
        """Wait for SIGTERM or SIGINT, then return: leaving the block drains. A second signal has its usual effect.

        Use it where nothing else, such as a web server, handles signals. Call it in the main thread.
        """
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        with on_stop_signal(lambda: loop.call_soon_threadsafe(stopped.set)):
            await stopped.wait()

    async def settle(self) -> None:
        """Wait until each part that can settle has settled, one after another, in the given order.

        Raise Unavailable if a part has failed permanently, because its work would never be done.
        """
        for part in self._parts:
            part.require_alive()
            if isinstance(part.target, Settles):
                await part.target.settle()

    async def drain(self) -> None:
        """Stop all parts: those with `stop()` may finish what they have begun within the grace period."""
        self._stopping = True
        tasks = [part.task for part in self._parts if part.task is not None]
        try:
            for part in self._parts:
                part.stop()
            if tasks:
                await asyncio.wait(tasks, timeout=self._grace_s)
        finally:
            await cancel_and_wait(*tasks)
            for part in self._parts:
                part.mark_unstarted()

    async def _supervise(self, part: _Part) -> None:
        try:
            await self._run_with_restarts(part)
            part.enter("stopped" if self._stopping else "ended")
        except asyncio.CancelledError:
            part.enter("stopped")
            raise
        except BaseException as error:
            part.failed(error, "failed")
            self._metrics.count("running_failures", part=part.name)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):  # these must end the event loop
                raise

    async def _run_with_restarts(self, part: _Part) -> None:
        """Run a part until its `run` returns; restart it after an error."""
        backoff = Backoff(first_s=RESTART_FIRST_S, max_s=RESTART_MAX_S)
        while True:
            began_s = time.monotonic()
            part.enter("running")
            try:
                await part.run()
                return
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                part.failed(error)  # a task inside the part was cancelled, not the part itself
            except Exception as error:
                part.failed(error)
            self._metrics.count("running_failures", part=part.name)
            if time.monotonic() - began_s >= RESTART_MAX_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())


class _Part:
    """A supervised part: its state, and the task that runs it."""

    def __init__(self, target: object, clock: Clock, names: dict[str, int]) -> None:
        self.target = target
        self.run = _run_method(target)
        self.name = _unique_name(_part_name(target), names)
        self.task: asyncio.Task[None] | None = None
        self._clock = clock
        self._state: RunState = "starting"
        self._since_ms = clock.now_ms()
        self._failures = 0
        self._last_error: str | None = None

    def enter(self, state: RunState) -> None:
        self._state, self._since_ms = state, self._clock.now_ms()

    def failed(self, error: BaseException, state: RunState = "restarting") -> None:
        self._failures += 1
        self._last_error = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
        consequence = "is restarted" if state == "restarting" else "is not restarted"
        LOGGER.warning("%s failed, and %s", self.name, consequence, exc_info=error)
        self.enter(state)

    def require_alive(self) -> None:
        """Raise Unavailable if the part has failed permanently."""
        if self._state == "failed":
            raise Unavailable(f"{self.name} failed and is not restarted: {self._last_error}")

    def stop(self) -> None:
        if self.task is None:
            return
        if self._state == "running" and isinstance(self.target, Stoppable):
            self.target.stop()
        else:
            self.task.cancel()

    def mark_unstarted(self) -> None:
        """Set the state to stopped if the task was cancelled before it could run."""
        if self._state == "starting":
            self.enter("stopped")

    def status(self) -> RunStatus:
        problem = self._last_error if self._state in ("restarting", "failed") else getattr(self.target, "problem", None)
        return RunStatus(
            name=self.name,
            problem=problem,
            state=self._state,
            since=datetime.fromtimestamp(self._since_ms / 1000, UTC),
            failures=self._failures,
            last_error=self._last_error,
        )


def _run_method(target: object) -> Callable[[], Awaitable[object]]:
    if inspect.iscoroutine(target):
        target.close()
        raise InvalidInput("pass the object or the coroutine function: a coroutine cannot be started twice")
    run: Any = getattr(target, "run", None)
    for found in (run, target):
        if inspect.iscoroutinefunction(found):
            return found
    raise InvalidInput(f"{target!r} cannot be run: it must have 'async def run(self)' or be a coroutine function")


def _part_name(target: object) -> str:
    for attribute in ("name", "__qualname__"):
        if isinstance(found := getattr(target, attribute, None), str):
            return found
    return type(target).__name__


def _unique_name(name: str, names: dict[str, int]) -> str:
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name} {names[name]}"


@contextmanager
def on_stop_signal(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT within the block, and restore the previous signal handlers."""
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInput("signals are only handled in the main thread: wait there, or end the block in another way")
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        stop()

    for number in STOP_SIGNALS:
        before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
