"""Run many awaitables with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain, islice
from typing import TypeVar

T = TypeVar("T")


async def run_bounded(act: Callable[[T], Awaitable[None]], items: Iterable[T], *, at_once: int) -> None:
    """Await `act` for every item, in any order. The first failure cancels the rest and is raised."""
    waiting = iter(items)
    first = list(islice(waiting, at_once))
    if len(first) <= 1:
        for item in chain(first, waiting):  # sequentially, if only one may be in flight
            await act(item)
        return
    # A worker starts with one item and continues with whatever is left, so items are only created when needed.

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
