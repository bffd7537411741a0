"""Acts on many entries: they continue in the background, page after page, and report their progress."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, Literal

import msgspec

from tidebook.core.errors import NotFound, TidebookError, Unavailable
from tidebook.runtime.clock import Clock

logger = logging.getLogger("tidebook.server.console")

#: How many acts run at once, and how many ended ones are remembered.
RUNNING_MAX: Final = 4
ENDED_MAX: Final = 50
#: How long the current page may take when an act is cancelled.
STOP_S: Final = 5.0

State = Literal["running", "done", "cancelled", "failed"]
#: The pages of an act: each step changes one, and yields how many entries it has changed.
Steps = AsyncGenerator[int, None]
#: Records an act in the audit; it is called when the act has ended.
OnEnd = Callable[["BulkAct"], Awaitable[None]]


class BulkAct:
    """One act on many entries of a queue."""

    def __init__(self, label: str, queue: str, total: int, steps: Steps, clock: Clock) -> None:
        self.id = secrets.token_hex(8)
        self.label = label
        self.queue = queue
        self.total = total
        #: How many entries it has changed so far.
        self.changed = 0
        self.state: State = "running"
        self.error: str | None = None
        self.started_at_ms = clock.now_ms()
        self.ended_at_ms: int | None = None
        self._clock = clock
        self._steps = steps
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False

    @property
    def now_ms(self) -> int:
        """The current time, from which its duration is computed."""
        return self._clock.now_ms()

    def start(self, on_end: OnEnd) -> None:
        """Run the steps in the background."""
        self._task = asyncio.create_task(self._run(on_end))

    async def cancel(self) -> None:
        """Stop after the current page, and return when that is recorded; changes already made remain."""
        self._is_cancelled = True
        if self._task is None:
            return
        await asyncio.wait((self._task,), timeout=STOP_S)
        if self.state == "running":
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self, on_end: OnEnd) -> None:
        state: State = "failed"
        try:
            async with aclosing(self._steps) as steps:
                async for changed in steps:
                    self.changed += changed
                    await asyncio.sleep(0)  # let other requests run: an embedded store never suspends
                    if self._is_cancelled:
                        state = "cancelled"
                        break
                else:
                    state = "done"
        except asyncio.CancelledError:
            state = "cancelled"
        except TidebookError as error:
            self.error = str(error)
        except Exception:
            logger.exception("%s failed", self.label)
            self.error = "it failed unexpectedly: the server's log has the cause"
        finally:
            self.state, self.ended_at_ms = state, self.now_ms
            await on_end(self)


class BulkResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of an act."""

    id: str
    label: str
    queue: str
    state: State
    total: int
    changed: int
    error: str | None
    started_at_ms: int
    ended_at_ms: int | None
    now_ms: int


class BulkActs:
    """The acts that this console has started."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._acts: dict[str, BulkAct] = {}

    def start(self, label: str, queue: str, total: int, steps: Steps, on_end: OnEnd) -> BulkAct:
        """Start an act."""
        running = [each for each in self._acts.values() if each.state == "running"]
        if len(running) >= RUNNING_MAX:
            raise Unavailable(f"{len(running)} acts on many entries are running: wait for one to end, or cancel it")
        for ended in [each.id for each in self._acts.values() if each.state != "running"][:-ENDED_MAX]:
            del self._acts[ended]
        act = BulkAct(label, queue, total, steps, self._clock)
        self._acts[act.id] = act
        act.start(on_end)
        return act

    def find(self, id: str, queue: str) -> BulkAct:
        """Return an act on a queue; raise `NotFound` if there is none."""
        found = self._acts.get(id)
        if found is None or found.queue != queue:
            raise NotFound(f"there is no act {id[:40]!r} on queue {queue[:100]!r}: it ended long ago or ran elsewhere")
        return found

    def running(self, queue: str) -> list[BulkResponse]:
        """Return the acts that run on a queue."""
        acts = [each for each in self._acts.values() if each.queue == queue and each.state == "running"]
        return [self.response(each) for each in acts]

    def response(self, act: BulkAct) -> BulkResponse:
        """Return the progress of an act."""
        return msgspec.convert(act, BulkResponse, from_attributes=True)

    async def close(self) -> None:
        """Cancel the acts that are running."""
        await asyncio.gather(*(each.cancel() for each in list(self._acts.values())))
