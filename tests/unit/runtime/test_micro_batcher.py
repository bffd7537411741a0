"""Items that wait at the same time share a group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidebook.runtime.micro_batcher import MicroBatcher


class Groups:
    """Records every group; each stays in flight until `go` is set."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, items: Sequence[int]) -> list[int | BaseException]:
        self.seen.append(list(items))
        await self.go.wait()
        return list(items)


async def run_all(items: Sequence[int], groups: Groups, batcher: MicroBatcher[int, int]) -> list[int]:
    waiting = asyncio.gather(*map(batcher, items))
    groups.go.set()
    return await waiting


async def test_items_that_arrive_together_share_a_group() -> None:
    groups = Groups()
    assert await run_all([1, 2, 3], groups, MicroBatcher(groups, group_max=3)) == [1, 2, 3]
    assert groups.seen == [[1, 2, 3]]


async def test_a_group_is_full_when_its_items_weigh_enough() -> None:
    groups = Groups()
    batcher = MicroBatcher(groups, group_max=256, flights_max=2, weigh=lambda item: item)
    await run_all([100, 100, 100, 50], groups, batcher)
    assert groups.seen == [[100, 100], [100, 50]]


async def test_an_item_heavier_than_a_group_runs_alone() -> None:
    groups = Groups()
    await run_all([10, 1_000, 10], groups, MicroBatcher(groups, group_max=256, weigh=lambda item: item))
    assert groups.seen == [[10], [1_000], [10]]


async def in_flight(items: Sequence[int], *, share_max: int) -> list[list[int]]:
    """Return the groups that are in flight at the same time."""
    groups = Groups()
    batcher = MicroBatcher(groups, group_max=256, share_max=share_max, flights_max=2, weigh=lambda item: item)
    waiting = asyncio.gather(*map(batcher, items))
    while len(groups.seen) < 2:  # noqa: ASYNC110  each iteration of the loop makes progress
        await asyncio.sleep(0)
    seen = list(groups.seen)
    groups.go.set()
    assert await waiting == items
    return seen


async def test_if_many_items_wait_each_group_takes_an_equal_share() -> None:
    assert await in_flight([100] * 8, share_max=1_000) == [[100] * 4, [100] * 4]


async def test_no_group_is_filled_beyond_share_max() -> None:
    assert await in_flight([100] * 12, share_max=500) == [[100] * 5, [100] * 5]


async def test_if_few_items_wait_a_group_is_filled_to_group_max() -> None:
    assert await in_flight([100] * 4, share_max=1_000) == [[100] * 2, [100] * 2]


async def test_a_cancelled_item_takes_no_room() -> None:
    groups = Groups()
    batcher = MicroBatcher(groups, group_max=200, weigh=lambda item: item)
    cancelled, *others = [batcher(item) for item in (110, 100, 90)]
    cancelled.cancel()
    groups.go.set()
    assert await asyncio.gather(*others) == [100, 90]
    assert groups.seen == [[100, 90]]
