"""Micro-batching: calls that arrive while a batch is in flight share the next one, and thus its round trip."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from tidebook.runtime.futures import resolve_future

Item = TypeVar("Item")
Result = TypeVar("Result")


class MicroBatcher(Generic[Item, Result]):
    """Runs items in groups, with at most `flights_max` groups in flight.

    `run` returns one outcome for each item, which may be an error; an exception that it raises is the outcome of all
    items of the group. `unwanted` receives the results of items whose awaiter was cancelled meanwhile.

    A group is filled up to a weight of `group_max`. An item weighs 1, or what `weigh` returns; an item that exceeds the
    limit runs in a group of one. If many items wait, a group is filled further, up to `share_max`, but not beyond an
    equal share of all items that wait or are in flight: otherwise one group would take all items, and fewer
    groups than allowed would be in flight.
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
        self._weight_in_flight = 0
        self._weigh = weigh or (lambda _: 1)
        self._flights_max = flights_max
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, item: Item) -> asyncio.Future[Result]:
        """Enqueue an item and return the future of its outcome."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._start_worker()
        return future

    def _start_worker(self) -> None:
        if self._in_flight < self._flights_max:
            self._in_flight += 1
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait until nothing is in flight."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        """Run groups until no item waits."""
        try:
            while self._waiting:
                group = self._next_group()
                if not group:
                    continue
                outcomes: Sequence[Result | BaseException]
                weight = sum(self._weigh(item) for item, _ in group)
                self._weight_in_flight += weight
                try:
                    outcomes = await self._run([item for item, _ in group])
                except BaseException as error:
                    outcomes = [error] * len(group)
                finally:
                    self._weight_in_flight -= weight
                for (_, future), outcome in zip(group, outcomes, strict=True):
                    if self._unwanted is not None and future.done() and not isinstance(outcome, BaseException):
                        self._unwanted(outcome)
                    resolve_future(future, outcome)
        finally:
            # No await between finding the queue empty and this: an item that is enqueued later starts a new worker.
            self._in_flight -= 1

    def _next_group(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        taken = [self._waiting.popleft() for _ in range(self._group_length())]
        return [(item, future) for item, future in taken if not future.done()]  # done means cancelled by its awaiter

    def _group_length(self) -> int:
        """Return how many of the waiting items fill a group; at least one."""
        room = max(self._group_max, min(self._share_max, self._equal_share()))
        for count, (item, future) in enumerate(self._waiting):
            room -= 0 if future.done() else self._weigh(item)
            if room < 0 and count:
                return count
        return len(self._waiting)

    def _equal_share(self) -> int:
        if self._share_max <= self._group_max:
            return 0
        waiting = sum(self._weigh(item) for item, future in self._waiting if not future.done())
        return (waiting + self._weight_in_flight) // self._flights_max
