"""Faults around a port: a chosen call is held until it is let go, fails before or after it is done, or comes late.

    faults = Faults()
    log = faults.around(EmbeddedLog(folder))
    held = faults.hold("read")                       # the next read waits
    reading = asyncio.create_task(...)
    await held.reached()                             # it has come to the log, and no further
    held.release()
    faults.fail("append", Unavailable("the log is gone"))
    faults.fail("send", OutcomeUnknown("no answer"), after=True)     # it is written, and its writer never learns

No sleep is needed: a test awaits that a call was reached, does what it wants to do meanwhile, and lets the call go.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

from tidebook.core.errors import TidebookError
from tidebook.log.port import Many, OnSentMany, one_of

T = TypeVar("T")

#: Whether a fault is meant for a call with these arguments.
Where = Callable[..., bool]


class Held:
    """A call that waits."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def reached(self) -> None:
        """Wait until the call has come."""
        await self._reached.wait()

    def release(self) -> None:
        """Let it go on; one that has not come yet will not be held any more."""
        self._released.set()

    async def wait(self) -> None:
        self._reached.set()
        await self._released.wait()


class _Fault:
    def __init__(
        self,
        *,
        held: Held | None = None,
        error: TidebookError | None = None,
        after: bool = False,
        times: int | None = 1,
        where: Where | None = None,
    ) -> None:
        self.held, self.error, self.after, self._left, self._where = held, error, after, times, where

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._left == 0 or (self._where is not None and not self._where(*args, **kwargs)):
            return False
        if self._left is not None:
            self._left -= 1
        return True


class Faults:
    """What is to go wrong, by the name of the call; and how often each was called."""

    def __init__(self) -> None:
        self._faults: dict[str, list[_Fault]] = {}
        self.calls: Counter[str] = Counter()
        self._dice: random.Random | None = None
        self._turns_max = 0

    def around(self, port: T) -> T:
        """The port, with these faults in front of it."""
        return cast("T", _Faulty(port, self))

    def hold(self, call: str, *, after: bool = False, where: Where | None = None) -> Held:
        """Hold the next call of this name, before it is done or, with `after`, before it answers."""
        held = Held()
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
        """Fail calls of this name instead of doing them or, with `after`, once they are done; None: for ever."""
        fault = _Fault(error=error, after=after, times=times, where=where)
        self._faults.setdefault(call, []).append(fault)

    def shake(self, dice: random.Random, *, turns_max: int = 4) -> None:
        """From now on every call but `send` gives others some turns, before and after: a seed is an interleaving."""
        self._dice, self._turns_max = dice, turns_max

    async def give_turns(self) -> None:
        if self._dice is not None:
            for _ in range(self._dice.randrange(self._turns_max)):
                await asyncio.sleep(0)

    def heal(self) -> None:
        """No further faults; whoever is held goes on."""
        self._dice = None
        for faults in self._faults.values():
            for fault in faults:
                if fault.held is not None:
                    fault.held.release()
        self._faults.clear()

    def take(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Fault | None:
        self.calls[call] += 1
        return next((fault for fault in self._faults.get(call, ()) if fault.takes(args, kwargs)), None)


class _Faulty:
    """Stands before a port and passes everything on that no fault is meant for."""

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
            await self._faults.give_turns()
            answer = await member(*args, **kwargs)
            await self._faults.give_turns()
            return answer
        if fault.after:
            answer = await member(*args, **kwargs)
            await _strike(fault)
            return answer
        await _strike(fault)
        return await member(*args, **kwargs)

    async def _iterate(
        self, name: str, member: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        fault = self._faults.take(name, args, kwargs)
        if fault is not None:
            await _strike(fault)
        async for item in member(*args, **kwargs):
            yield item

    def _send(self, record: Any, on_sent: Callable[[Any], None]) -> None:
        """`send` is no coroutine: it calls back, and so do its faults."""
        fault = self._faults.take("send", (record, on_sent), {})
        if fault is None:
            self._port.send(record, on_sent)
        elif fault.after:
            self._port.send(record, lambda sent: _later(_answer(fault, sent, on_sent)))
        else:
            _later(self._send_late(fault, record, on_sent))

    def _send_many(self, many: Many, on_sent: OnSentMany) -> None:
        for place in range(len(many.values)):
            self._send(many.record(place), one_of(on_sent, place))

    async def _send_late(self, fault: _Fault, record: Any, on_sent: Callable[[Any], None]) -> None:
        try:
            await _strike(fault)
        except TidebookError as error:
            on_sent(error)
        else:
            self._port.send(record, on_sent)


async def _strike(fault: _Fault) -> None:
    if fault.held is not None:
        await fault.held.wait()
    if fault.error is not None:
        raise fault.error


async def _answer(fault: _Fault, sent: Any, on_sent: Callable[[Any], None]) -> None:
    try:
        await _strike(fault)
    except TidebookError as error:
        on_sent(error)
    else:
        on_sent(sent)


_running: set[asyncio.Task[None]] = set()


def _later(work: Any) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
