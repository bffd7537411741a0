"""What a role has: the plan, its history, chance, and when to stop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from faults.plan import Plan
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.testing.histories.line import HistoryFile

#: Errors that say that nothing was changed.
WITHOUT_EFFECT: tuple[type[TidebookError], ...] = (Unavailable, InvalidInput)
PAUSE_S = 0.05


class Context:
    """The surroundings of a role."""

    def __init__(self, plan: Plan, name: str, seed: int) -> None:
        self.plan = plan
        self.name = name
        self.chance = random.Random(seed)
        self.history = HistoryFile(plan.histories / f"{name}.ndjson", name)
        self.stopping = asyncio.Event()
        self._values = 0

    def value(self) -> str:
        """Return a value that is unique in the run."""
        self._values += 1
        return f"{self.name}-{self._values}"

    async def pause(self, most_s: float = PAUSE_S) -> None:
        """Wait for a random time, or until the role stops."""
        try:
            async with asyncio.timeout(self.chance.random() * most_s):
                await self.stopping.wait()
        except TimeoutError:
            pass

    async def record(
        self,
        op: str,
        call: Callable[[], Awaitable[Any]],
        result: Callable[[Any], Any] = lambda found: None,
        *,
        failures: tuple[type[TidebookError], ...] = WITHOUT_EFFECT,
        **args: Any,
    ) -> Any:
        """Make a call, write it down, and return what it returned or its error."""
        pending = self.history.begin(op, **args)
        try:
            found = await call()
        except failures as error:
            facts = {"found": error.found} if hasattr(error, "found") else None
            pending.fail(error, facts)
            return error
        except (TidebookError, OSError) as error:
            pending.unknown(error)
            return error
        pending.ok(result(found))
        return found


def is_unknown(found: Any) -> bool:
    """Return whether a call ended with an unknown outcome that can be retried."""
    return isinstance(found, OutcomeUnknown) and found.append_id is not None
