"""`run_bounded` acts on every item, with bounded concurrency."""

from __future__ import annotations

import asyncio

import pytest

from tidebook.store.cassandra.session import run_bounded


@pytest.mark.parametrize("at_once", [1, 2, 3, 10])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
async def test_every_item_is_acted_on_once_with_bounded_concurrency(at_once: int, count: int) -> None:
    done: list[int] = []
    together = most = 0

    async def act(item: int) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0)
        done.append(item)
        together -= 1

    await run_bounded(act, iter(range(count)), at_once=at_once)
    assert sorted(done) == list(range(count))
    assert most <= at_once


async def test_the_first_failure_is_raised_and_cancels_the_rest() -> None:
    done: list[int] = []

    async def act(item: int) -> None:
        if item == 1:
            raise ValueError("this one")
        await asyncio.sleep(0)
        done.append(item)

    with pytest.raises(ValueError, match="this one"):
        await run_bounded(act, iter(range(100)), at_once=2)
    assert len(done) < 99
