"""Calls that arrive while one is under way share the next: one statement and one commit for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from tidebook.core.settle import settle

Item = TypeVar("Item")
Result = TypeVar("Result")


class Gather(Generic[Item, Result]):
    """Runs items in groups. `run` gives one outcome an item, an error too; what it raises is everybody's.

    A group is filled until its items weigh `group_max`; each weighs one, unless `weigh` says otherwise, and what weighs
    more than that runs alone. Where many wait it is filled further, up to `share_max`, but not beyond the equal part
    that each flight has of all that waits or is under way: else all would go in one, and stay together. `unwanted` gets
    a result whose awaiter has gone while it was being made.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[Sequence[Result | BaseException]]],
        *,
        group_max: int,
        share_max: int = 0,
        flights_max: int = 1,
        weigh: Callable[[Item], int] | None = None,
        unwanted: Callable[[Result], None] | None = None,
    ) -> None:
        self._unwanted = unwanted
        self._run = run
        self._group_max = group_max
        self._share_max = share_max
        self._under_way = 0
        self._weigh = weigh or _one
        self._flights_max = flights_max
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._flying = 0
        self._flights: set[asyncio.Task[None]] = set()

    def __call__(self, item: Item) -> asyncio.Future[Result]:
        """The outcome of one item, to be awaited."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._start()
        return future

    def is_idle(self) -> bool:
        """Nothing is under way."""
        return self._flying == 0

    async def alone(self, item: Item) -> Result:
        """Run an item at once, in the caller's own task: a turn of the loop earlier, for who expects no company."""
        self._flying += 1
        try:
            (outcome,) = await self._run([item])
        finally:
            self._flying -= 1
            if self._waiting:
                self._start()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _start(self) -> None:
        if self._flying < self._flights_max:
            self._flying += 1
            flight = asyncio.create_task(self._fly())
            self._flights.add(flight)
            flight.add_done_callback(self._flights.discard)

    async def close(self) -> None:
        """Wait for what is under way."""
        while self._flights:
            await asyncio.gather(*self._flights, return_exceptions=True)

    async def _fly(self) -> None:
        try:
            await self._serve()
        finally:
            self._flying -= 1  # in the same step in which nothing was left to serve

    async def _serve(self) -> None:
        while self._waiting:
            group = self._next_group()
            if not group:
                continue
            outcomes: Sequence[Result | BaseException]
            weight = sum(self._weigh(item) for item, _ in group)
            self._under_way += weight
            try:
                outcomes = await self._run([item for item, _ in group])
            except BaseException as error:
                outcomes = [error] * len(group)
            finally:
                self._under_way -= weight
            for (_, future), outcome in zip(group, outcomes, strict=True):
                if self._unwanted is not None and future.done() and not isinstance(outcome, BaseException):
                    self._unwanted(outcome)
                settle(future, outcome)

    def _next_group(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        taken = [self._waiting.popleft() for _ in range(self._fitting())]
        return [(item, future) for item, future in taken if not future.done()]  # who gave up wants nothing

    def _fitting(self) -> int:
        """How many of those who wait fill a group; one at least."""
        room = max(self._group_max, min(self._share_max, self._equal_part()))
        for count, (item, future) in enumerate(self._waiting):
            room -= 0 if future.done() else self._weigh(item)
            if room < 0 and count:
                return count
        return len(self._waiting)

    def _equal_part(self) -> int:
        if self._share_max <= self._group_max:
            return 0
        waiting = sum(self._weigh(item) for item, future in self._waiting if not future.done())
        return (waiting + self._under_way) // self._flights_max


def _one(item: object) -> int:
    return 1
