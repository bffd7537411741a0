"""Rows that are asked for before they are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication import EventRow
from tidebook.journal.ahead import RowsAhead
from tidebook.store.port import StoreReader

TO = 100


class Counted:
    """A store of a hundred events that notes what it is asked for, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.may_answer = asyncio.Event()

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        self.asked.append((after, limit))
        await self.may_answer.wait()
        last = min(after + limit, to)
        return [EventRow(number, b"", 0, Position(1, number), 0) for number in range(after + 1, last + 1)]


def opened(store: Counted) -> RowsAhead:
    return RowsAhead(cast(StoreReader, store), Key("t", "a"), cast(Any, None), to=TO, limit=5)


async def test_each_time_more_is_asked_for_up_to_four_pages() -> None:
    store = Counted()
    store.may_answer.set()
    rows, numbers = opened(store), list[int]()
    while not numbers or numbers[-1] < TO:
        numbers += [row.seq_nr for row in await rows.take(numbers[-1] if numbers else 0)]
        rows.ask(numbers[-1])
    assert numbers == list(range(1, TO + 1))
    assert store.asked == [(0, 5), (5, 10), (15, 20), (35, 20), (55, 20), (75, 20), (95, 20)]


async def test_what_was_asked_for_is_on_its_way_before_it_is_taken_and_given_up_when_nobody_will() -> None:
    store = Counted()
    rows = opened(store)
    rows.ask(20)
    await asyncio.sleep(0)
    assert store.asked == [(20, 10)]
    [task] = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    rows.close()
    await asyncio.wait([task])
    assert task.cancelled()
