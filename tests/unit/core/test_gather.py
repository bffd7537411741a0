"""Items that wait together share a group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

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


async def under_way(items: Sequence[int], *, share_max: int) -> list[list[int]]:
    """The groups that are under way at one time."""
    groups = Groups()
    gather = Gather(groups, group_max=256, share_max=share_max, flights_max=2, weigh=lambda item: item)
    waiting = asyncio.gather(*map(gather, items))
    while len(groups.came) < 2:  # noqa: ASYNC110  each turn of the loop brings it on
        await asyncio.sleep(0)
    came = list(groups.came)
    groups.go.set()
    assert await waiting == items
    return came


async def test_where_many_wait_each_flight_takes_its_equal_part() -> None:
    assert await under_way([100] * 8, share_max=1_000) == [[100] * 4, [100] * 4]


async def test_no_group_is_filled_beyond_what_may_be_shared() -> None:
    assert await under_way([100] * 12, share_max=500) == [[100] * 5, [100] * 5]


async def test_where_few_wait_a_group_is_as_full_as_ever() -> None:
    assert await under_way([100] * 4, share_max=1_000) == [[100] * 2, [100] * 2]


async def test_who_gave_up_takes_no_room() -> None:
    groups = Groups()
    gather = Gather(groups, group_max=200, weigh=lambda item: item)
    given_up, *others = [gather(item) for item in (110, 100, 90)]
    given_up.cancel()
    groups.go.set()
    assert await asyncio.gather(*others) == [100, 90]
    assert groups.came == [[100, 90]]


async def test_who_runs_alone_counts_as_a_flight_and_those_who_came_meanwhile_go_next() -> None:
    groups = Groups()
    gather: Gather[int, int] = Gather(groups, group_max=10)
    assert gather.is_idle()
    alone = asyncio.create_task(gather.alone(1))
    await asyncio.sleep(0)
    assert not gather.is_idle()
    others = asyncio.gather(gather(2), gather(3))
    await asyncio.sleep(0)
    assert groups.came == [[1]]
    groups.go.set()
    assert [await alone, *await others] == [1, 2, 3]
    assert groups.came == [[1], [2, 3]]


async def test_what_fails_alone_is_raised() -> None:
    async def fail(items: Sequence[int]) -> list[int | BaseException]:
        return [ValueError("no") for _ in items]

    gather: Gather[int, int] = Gather(fail, group_max=10)
    with pytest.raises(ValueError, match="no"):
        await gather.alone(1)
    assert gather.is_idle()
