"""Items that wait together share a group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidebook.core.gather import Gather


class Groups:
    """Keeps every group that came; each stays under way until it is let go."""

    def __init__(self) -> None:
        self.came: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, items: Sequence[int]) -> list[int | BaseException]:
        self.came.append(list(items))
        await self.go.wait()
        return list(items)


async def run_all(items: Sequence[int], groups: Groups, gather: Gather[int, int]) -> list[int]:
    waiting = asyncio.gather(*map(gather, items))
    groups.go.set()
    return await waiting


async def test_items_that_come_at_once_share_a_group() -> None:
    groups = Groups()
    assert await run_all([1, 2, 3], groups, Gather(groups, group_max=3)) == [1, 2, 3]
    assert groups.came == [[1, 2, 3]]


async def test_a_group_is_full_when_its_items_weigh_enough() -> None:
    groups = Groups()
    gather = Gather(groups, group_max=256, flights_max=2, weigh=lambda item: item)
    await run_all([100, 100, 100, 50], groups, gather)
    assert groups.came == [[100, 100], [100, 50]]


async def test_what_weighs_more_than_a_group_may_runs_alone() -> None:
    groups = Groups()
    await run_all([10, 1_000, 10], groups, Gather(groups, group_max=256, weigh=lambda item: item))
    assert groups.came == [[10], [1_000], [10]]


async def test_who_gave_up_takes_no_room() -> None:
    groups = Groups()
    gather = Gather(groups, group_max=200, weigh=lambda item: item)
    given_up, *others = [gather(item) for item in (110, 100, 90)]
    given_up.cancel()
    groups.go.set()
    assert await asyncio.gather(*others) == [100, 90]
    assert groups.came == [[100, 90]]
