"""Many awaitables, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain, islice
from typing import TypeVar

T = TypeVar("T")


async def each(act: Callable[[T], Awaitable[None]], items: Iterable[T], *, at_once: int) -> None:
    """Await `act` for every item, in any order. The first failure ends the rest and is raised."""
    waiting = iter(items)
    first = list(islice(waiting, at_once))
    if len(first) <= 1:
        for item in chain(first, waiting):  # one after another, where only one may be on its way
            await act(item)
        return
    # A worker begins with an item of its own and goes on with whatever is left: no item is made before its time.

    async def work(item: T) -> None:
        for next_item in chain((item,), waiting):
            await act(next_item)

    tasks = [asyncio.ensure_future(work(item)) for item in first]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
