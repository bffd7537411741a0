"""Fault injection for ports: hold a chosen call until it is released, or fail it before or after its effect.

    faults = Faults()
    log = faults.around(SqliteLog(folder))
    held = faults.hold("read")                       # the next read waits
    reading = asyncio.create_task(...)
    await held.reached()                             # the call has reached the log and waits there
    held.release()
    faults.fail("append", Unavailable("the log is unavailable"))
    faults.fail("send", OutcomeUnknown("no answer"), after=True)     # written, but reported as unknown

So a test needs no sleep: it waits until the call is reached, acts, and releases the call.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

from tidebook.core.errors import TidebookError
from tidebook.log.port import OnSentMany, RecordColumns, callback_for

T = TypeVar("T")

#: Returns whether a fault applies to a call with these arguments.
Where = Callable[..., bool]


class HeldCall:
    """A call that waits until the test releases it."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def reached(self) -> None:
        """Wait until the call is made."""
        await self._reached.wait()

    def release(self) -> None:
        """Let the call continue; if it was not made yet, it will not wait."""
        self._released.set()

    async def wait(self) -> None:
        """Report the call as reached and wait for its release. Only the faulty port calls this."""
        self._reached.set()
        await self._released.wait()


class _Fault:
    def __init__(
        self,
        *,
        held: HeldCall | None = None,
        error: TidebookError | None = None,
        after: bool = False,
        times: int | None = 1,
        where: Where | None = None,
    ) -> None:
        self.held, self.error, self.after, self._times_left, self._where = held, error, after, times, where

    def applies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the fault applies to this call, and count it if so."""
        if self._times_left == 0 or (self._where is not None and not self._where(*args, **kwargs)):
            return False
        if self._times_left is not None:
            self._times_left -= 1
        return True


class Faults:
    """The faults to inject, by the name of the call, and a counter of all calls.

    A fault of a method that returns an async iterator applies before the first item; there `after` has no effect.
    """

    def __init__(self) -> None:
        self._faults: dict[str, list[_Fault]] = {}
        self.calls: Counter[str] = Counter()
        self._random: random.Random | None = None
        self._turns_max = 0

    def around(self, port: T) -> T:
        """Wrap a port so that these faults apply to its calls."""
        return cast("T", _Faulty(port, self))

    def hold(self, call: str, *, after: bool = False, where: Where | None = None) -> HeldCall:
        """Hold the next call of this name before its effect or, with `after`, between its effect and its return."""
        held = HeldCall()
        self._faults.setdefault(call, []).append(_Fault(held=held, after=after, where=where))
        return held

    def fail(
        self,
        call: str,
        error: TidebookError,
        *,
        after: bool = False,
        times: int | None = 1,
        where: Where | None = None,
    ) -> None:
        """Fail the next `times` calls of this name, instead of their effect or, with `after`, after it.

        With `times=None`, all calls of this name fail until `heal`.
        """
        fault = _Fault(error=error, after=after, times=times, where=where)
        self._faults.setdefault(call, []).append(fault)

    def shake(self, dice: random.Random, *, turns_max: int = 4) -> None:
        """Before and after each awaited call without a fault, yield to other tasks fewer than `turns_max` times.

        `dice` chooses how often, so its seed determines the interleaving of the tasks. `send` and iterations do not
        yield.
        """
        self._random, self._turns_max = dice, turns_max

    async def yield_randomly(self) -> None:
        """Let other tasks run, if `shake` was called."""
        if self._random is not None:
            for _ in range(self._random.randrange(self._turns_max)):
                await asyncio.sleep(0)

    def heal(self) -> None:
        """Remove all faults and release all held calls."""
        self._random = None
        for faults in self._faults.values():
            for fault in faults:
                if fault.held is not None:
                    fault.held.release()
        self._faults.clear()

    def take(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Fault | None:
        """Count a call and return the fault that applies to it, if any."""
        self.calls[call] += 1
        return next((fault for fault in self._faults.get(call, ()) if fault.applies(args, kwargs)), None)


class _Faulty:
    """Wraps a port: applies faults and delegates all calls."""

    def __init__(self, port: Any, faults: Faults) -> None:
        self._port = port
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._port, name)
        if name == "send":
            return self._send
        if name == "send_many":
            return self._send_many
        if inspect.iscoroutinefunction(member):
            return lambda *args, **kwargs: self._call(name, member, args, kwargs)
        if inspect.isasyncgenfunction(member):
            return lambda *args, **kwargs: self._iterate(name, member, args, kwargs)
        return member

    async def _call(self, name: str, member: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fault = self._faults.take(name, args, kwargs)
        if fault is None:
            await self._faults.yield_randomly()
            result = await member(*args, **kwargs)
            await self._faults.yield_randomly()
            return result
        if fault.after:
            result = await member(*args, **kwargs)
            await _apply(fault)
            return result
        await _apply(fault)
        return await member(*args, **kwargs)

    async def _iterate(
        self, name: str, member: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        fault = self._faults.take(name, args, kwargs)
        if fault is not None:
            await _apply(fault)
        async for item in member(*args, **kwargs):
            yield item

    def _send(self, record: Any, on_sent: Callable[[Any], None]) -> None:
        """Apply faults to `send`, which reports through a callback and is not a coroutine."""
        fault = self._faults.take("send", (record, on_sent), {})
        if fault is None:
            self._port.send(record, on_sent)
        elif fault.after:
            self._port.send(record, lambda sent: _spawn(_apply_then(fault, on_sent, lambda: on_sent(sent))))
        else:
            _spawn(_apply_then(fault, on_sent, lambda: self._port.send(record, on_sent)))

    def _send_many(self, columns: RecordColumns, on_sent: OnSentMany) -> None:
        for index in range(len(columns.values)):
            self._send(columns.record(index), callback_for(on_sent, index))


async def _apply(fault: _Fault) -> None:
    if fault.held is not None:
        await fault.held.wait()
    if fault.error is not None:
        raise fault.error


async def _apply_then(fault: _Fault, on_sent: Callable[[Any], None], proceed: Callable[[], None]) -> None:
    """Apply a fault of `send`; report its error, or proceed if it has none."""
    try:
        await _apply(fault)
    except TidebookError as error:
        on_sent(error)
    else:
        proceed()


_running: set[asyncio.Task[None]] = set()


def _spawn(coroutine: Any) -> None:
    task = asyncio.get_running_loop().create_task(coroutine)
    _running.add(task)
    task.add_done_callback(_running.discard)
