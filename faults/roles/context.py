"""What every role uses: the plan, its history, a random generator, a clock, and a stop event."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.exc import DBAPIError

from faults.disk import install_faulty_files
from faults.plan import SERVER_REST, Plan
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.runtime.clock import SystemClock
from tidebook.testing.histories.line import HistoryFile
from tidebook.wiring.book import Book
from tidebook.wiring.settings import read_settings

#: Errors that are only raised if the call changed nothing.
WITHOUT_EFFECT: tuple[type[TidebookError], ...] = (Unavailable, InvalidInput)
PAUSE_S = 0.05


class JumpingClock(SystemClock):
    """The clock of the machine, with an offset of the wall clock that faults change."""

    def __init__(self) -> None:
        self.off_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.off_ms


class Context:
    """The plan, history, random generator and stop event of a role."""

    def __init__(self, plan: Plan, name: str, seed: int) -> None:
        self.plan = plan
        self.name = name
        self.chance = random.Random(seed)
        self.history = HistoryFile(plan.histories / f"{name}.ndjson", name)
        self.stopping = asyncio.Event()
        self.clock = JumpingClock()
        #: Makes the files of an embedded book fail; None on servers.
        self.disk = install_faulty_files(random.Random(seed)) if plan.brokers is None else None
        self._values = 0

    def open_book(self, *, replicate: bool = False) -> Book:
        """Return the book of the run, to be used with `async with`; its clock is that of this process."""
        return Book(read_settings(self.plan.book), clock=self.clock, replicate=replicate)

    def value(self) -> str:
        """Return a value that is unique in the run."""
        self._values += 1
        return f"{self.name}-{self._values}"

    def report_restart(self, part: str, error: BaseException) -> None:
        """Record that a part of this process ended with an error, and is started again."""
        self.history.observe("restarted", {"error": type(error).__name__}, part=part)

    async def pause(self, most_s: float = PAUSE_S) -> None:
        """Wait for a random time, or until the role stops."""
        try:
            async with asyncio.timeout(self.chance.random() * most_s):
                await self.stopping.wait()
        except TimeoutError:
            pass

    async def rest(self, most_s: float = PAUSE_S) -> None:
        """Wait between two calls of a source, longer on servers."""
        await self.pause(most_s * (1.0 if self.plan.brokers is None else SERVER_REST))

    async def record(
        self,
        op: str,
        call: Callable[[], Awaitable[Any]],
        result: Callable[[Any], Any] = lambda found: None,
        *,
        failures: tuple[type[Exception], ...] = WITHOUT_EFFECT,
        **args: Any,
    ) -> Any:
        """Make a call and record it; return its result, or its error if it fails."""
        pending = self.history.begin(op, **args)
        try:
            found = await call()
        except failures as error:
            facts = {"found": error.found} if hasattr(error, "found") else None
            pending.fail(error, facts)
            return error
        except (TidebookError, OSError, DBAPIError) as error:
            pending.unknown(error)
            return error
        pending.ok(result(found))
        return found


def is_unknown(found: Any) -> bool:
    """Return whether a result is an unknown outcome of an append that can be retried."""
    return isinstance(found, OutcomeUnknown) and found.append_id is not None
