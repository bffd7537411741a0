"""Prefetched rows: which ranges are requested, which responses are used, and which are discarded."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow
from tidebook.journal.prefetch import RowPrefetcher
from tidebook.store.port import StoreReader

TO = 60


class Down:
    """A store that does not answer."""

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        raise Unavailable("the store is down")


class Counted:
    """A store that records its requests, and answers when the test lets it."""

    def __init__(self, numbers: Iterable[int] = range(1, TO + 1), *, rows_max: int = 1000) -> None:
        self.numbers = list(numbers)
        self.requested: list[tuple[int, int, int]] = []
        self.rows_max = rows_max
        self.may_answer = asyncio.Event()

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        self.requested.append((after, to, limit))
        await self.may_answer.wait()
        found = [number for number in self.numbers if after < number <= to][: min(limit, self.rows_max)]
        return [EventRow(number, b"", 0, Position(1, number), 0) for number in found]


def head(*, incarnation: int = 0, at: int = TO) -> Head:
    return Head(True, TO, 0, Position(1, incarnation), Position(1, at), 25, None, 0, (), None, ())


def opened(store: Counted | Down) -> RowPrefetcher:
    rows = RowPrefetcher(cast(StoreReader, store), Key("t", "a"), limit=20)
    rows.begin(head(), after=0, to=TO)
    return rows


async def read(rows: RowPrefetcher) -> list[int]:
    numbers = list[int]()
    while not numbers or numbers[-1] < TO:
        found = await rows.take(numbers[-1] if numbers else 0)
        if not found:
            break
        numbers += [row.seq_nr for row in found]
        rows.prefetch()
    return numbers


async def test_half_pages_and_whole_pages_are_requested_concurrently_and_end_with_their_segment() -> None:
    store = Counted()
    rows = opened(store)
    rows.prefetch()
    await asyncio.sleep(0)
    assert store.requested == [(0, 10, 10), (10, 20, 10), (20, 25, 5)]
    store.may_answer.set()
    assert await read(rows) == store.numbers
    assert store.requested[3:] == [(25, 45, 20), (45, 50, 5), (50, 60, 10)]


async def test_after_two_halves_of_the_first_page_whole_pages_are_requested() -> None:
    rows = RowPrefetcher(cast(StoreReader, store := Counted()), Key("t", "a"), limit=20)
    rows.begin(msgspec.structs.replace(head(), segment_size=1000), after=0, to=TO)
    rows.prefetch()
    await asyncio.sleep(0)
    assert store.requested == [(0, 10, 10), (10, 20, 10), (20, 40, 20)]
    rows.close()


async def test_after_a_gap_each_response_says_where_the_next_request_starts() -> None:
    store = Counted([1, 2, 3, *range(50, TO + 1)])
    store.may_answer.set()
    rows = opened(store)
    rows.prefetch()
    assert await read(rows) == store.numbers
    assert store.requested[3:] == [(3, TO, 20)]


async def test_if_the_first_numbers_are_deleted_the_rest_is_found_with_one_more_request() -> None:
    store = Counted(range(41, TO + 1))
    store.may_answer.set()
    rows = opened(store)
    rows.prefetch()
    assert [row.seq_nr for row in await rows.take(0)] == store.numbers
    assert store.requested[3:] == [(0, TO, 20)]


async def test_rows_too_large_for_one_answer_are_not_requested_concurrently() -> None:
    store = Counted(rows_max=7)
    store.may_answer.set()
    rows = opened(store)
    assert await read(rows) == store.numbers
    assert store.requested == [(after, TO, 20) for after in range(0, TO, 7)]


async def test_rows_requested_with_an_earlier_head_of_this_incarnation_are_used() -> None:
    store = Counted()
    store.may_answer.set()
    rows = opened(store)
    rows.prefetch()
    await asyncio.sleep(0)
    requested = list(store.requested)
    assert rows.begin(head(at=TO + 5), after=0, to=TO)
    await rows.take(0)
    assert store.requested == requested


async def test_rows_requested_with_another_or_a_later_head_or_another_start_are_discarded() -> None:
    for now, after in ((head(incarnation=3), 0), (head(at=TO - 1), 0), (head(), 5)):
        rows = opened(Counted())
        rows.prefetch()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not rows.begin(now, after=after, to=TO)
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)


async def test_rows_that_reappear_during_a_read_are_not_returned_twice() -> None:
    """The rows are missing in the first response and present in the next, as during a concurrent repair."""
    store = Counted(())
    store.may_answer.set()
    rows = opened(store)
    rows.prefetch()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    store.numbers = list(range(1, TO + 1))
    assert await read(rows) == store.numbers


async def test_ranges_prefetched_after_an_empty_one_are_discarded_when_it_is_read_again() -> None:
    """Only the first response for the first range is empty; the second one has the rows of the others."""

    class Late(Counted):
        async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
            rows = await super().events(key, head, after=after, to=to, limit=limit)
            return [] if self.requested[:1] == [(after, to, limit)] else rows

    store = Late()
    store.may_answer.set()
    rows = opened(store)
    rows.prefetch()
    assert await read(rows) == store.numbers


@given(
    numbers=st.sets(st.integers(1, TO)),
    rows_max=st.integers(1, 25),
    early=st.booleans(),
    answers_first=st.booleans(),
)
async def test_every_row_is_returned_once_and_in_order_whatever_the_gaps_and_sizes(
    numbers: set[int], rows_max: int, early: bool, answers_first: bool
) -> None:
    store = Counted(sorted(numbers), rows_max=rows_max)
    rows = opened(store)
    if early:
        rows.prefetch()
    if answers_first:
        store.may_answer.set()
    rows.begin(head(at=TO + 1), after=0, to=TO)
    store.may_answer.set()
    assert await read(rows) == store.numbers
    assert len(store.requested) <= 4 + 2 * (TO // 5 + len(numbers))
    rows.close()


async def test_a_failed_request_whose_rows_are_not_taken_raises_nowhere() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    rows = opened(Down())
    rows.prefetch()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    rows.close()
    del rows
    gc.collect()
    assert reported == []


async def test_a_failed_request_raises_when_its_rows_are_taken() -> None:
    rows = opened(Down())
    rows.prefetch()
    with pytest.raises(Unavailable):
        await rows.take(0)
    rows.close()


async def test_a_journal_without_rows_is_requested_once() -> None:
    store = Counted(())
    store.may_answer.set()
    rows = opened(store)
    assert await rows.take(0) == []
    assert not rows.dense
    assert store.requested == [(0, TO, 20)]


async def test_pages_of_one_event_are_requested_one_by_one() -> None:
    store = Counted()
    rows = RowPrefetcher(cast(StoreReader, store), Key("t", "a"), limit=1)
    rows.begin(head(), after=0, to=TO)
    rows.prefetch()
    await asyncio.sleep(0)
    assert store.requested == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
    store.may_answer.set()
    assert [row.seq_nr for row in await rows.take(0)] == [1]
    assert rows.dense, "the ranges after it are still prefetched"
    rows.close()


async def test_prefetched_ranges_are_discarded_after_an_incomplete_one() -> None:
    """The events are too large for one response, so the next range would begin after the rest of this one."""
    store = Counted(rows_max=7)
    store.may_answer.set()
    rows = opened(store)
    rows.prefetch()
    assert await read(rows) == store.numbers
