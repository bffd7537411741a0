"""Test cases of reading: ranges, gaps, pages, live tails, the ids of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tidebook.core.errors import Conflict, Truncated
from tidebook.core.seq_nr import LAST
from tidebook.testing.conformance.journal_base import (
    CASE_TIMEOUT_S,
    JournalSuite,
    JournalTester,
    events,
    numbers,
    payloads,
)


class JournalReadingCases(JournalSuite):
    """Test cases of the events that a read returns."""

    async def test_a_missing_journal_has_no_events_and_no_pointer(self, tester: JournalTester) -> None:
        assert await tester.read("a") == []
        assert await tester.pointer("a") is None

    @pytest.mark.parametrize(
        ("start", "end", "wanted"),
        [
            (1, LAST, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
            (4, LAST, [4, 5, 6, 7, 8, 9]),
            (1, 4, [1, 2, 3, 4]),
            (3, 3, [3]),
            (5, 6, [5, 6]),
            (9, 99, [9]),
            (10, LAST, []),
            (7, 3, []),
        ],
    )
    async def test_a_range_is_read_from_start_to_end(
        self, tester: JournalTester, start: int, end: int, wanted: list[int]
    ) -> None:
        for size in (4, 2, 3):
            await tester.append("a", events(*range(size)))
        assert numbers(await tester.read("a", start=start, end=end)) == wanted

    async def test_a_gap_that_ends_a_segment_is_not_the_end(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2, 3))
        await tester.append("a", events(11), at=11)
        assert numbers(await tester.read("a")) == [1, 2, 3, 11]
        assert numbers(await tester.read("a", start=4)) == [11]

    async def test_a_jump_over_many_segments_does_not_slow_a_read(self, tester: JournalTester) -> None:
        await tester.append("a", events(1))
        await tester.append("a", events(2, 3), at=10**15)
        await tester.append("a", events(4), at=LAST)
        assert numbers(await tester.read("a")) == [1, 10**15, 10**15 + 1, LAST]
        assert numbers(await tester.read("a", start=2)) == [10**15, 10**15 + 1, LAST]

    async def test_a_read_of_several_pages_is_complete(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(8)))
        await tester.append("a", events(*range(8, 17)))
        assert payloads(await tester.read("a")) == list(range(17))

    async def test_a_read_sees_every_append_that_was_acknowledged_before_it(self, tester: JournalTester) -> None:
        for i in range(10):
            await tester.append("a", events(i))
            assert payloads(await tester.read("a")) == list(range(i + 1))
            assert await tester.pointer("a") == i + 1

    async def test_the_offset_barrier_sees_this_process_own_appends(self, tester: JournalTester) -> None:
        for i in range(5):
            await tester.append("a", events(i))
            assert payloads(await tester.read("a", barrier="offset")) == list(range(i + 1))
            assert await tester.pointer("a", barrier="offset") == i + 1

    async def test_the_time_of_events_never_goes_back_within_a_journal(self, tester: JournalTester) -> None:
        for i in range(5):
            await tester.append("a", events(i))
        times = [event.timestamp_ms for event in await tester.read("a")]
        assert times == sorted(times)

    async def test_a_read_that_is_closed_early_leaks_nothing(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(10)))
        reading = tester.reading("a")
        assert (await anext(reading)).seq_nr == 1
        await reading.aclose()  # type: ignore[attr-defined]
        assert numbers(await tester.read("a", start=9)) == [9, 10]

    async def test_an_append_during_a_read_is_seen_whole_or_not_at_all(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(7)))
        reading = tester.reading("a")
        read = [await anext(reading)]
        await tester.append("a", events("new"))
        read += [event async for event in reading]
        assert numbers(read) == [1, 2, 3, 4, 5, 6, 7]

    async def test_a_read_during_a_purge_raises_truncated_or_returns_all_events(self, tester: JournalTester) -> None:
        async def purge() -> None:
            await tester.purge("a")
            await tester.append("a", events("new incarnation"))

        await self.read_during(tester, purge)

    async def test_a_read_during_a_delete_raises_truncated_or_returns_all_events(self, tester: JournalTester) -> None:
        await self.read_during(tester, lambda: tester.delete("a", to=8))

    async def read_during(self, tester: JournalTester, change: Callable[[], Awaitable[None]]) -> None:
        """Read nine events, with a change after the first one."""
        await tester.append("a", events(*range(9)))
        await tester.replicate()
        reading = tester.reading("a")
        read = [await anext(reading)]
        await change()
        await tester.replicate()
        try:
            read += [event async for event in reading]
        except Truncated:
            assert payloads(read) == list(range(len(read)))
        else:
            assert payloads(read) == list(range(9))

    # ---- ids

    async def test_ids_lists_every_live_journal_once(self, tester: JournalTester) -> None:
        for id in ("a", "b", "c", "d"):
            await tester.append(id, events(1))
        await tester.append("a", events(2))
        await tester.purge("b")
        await tester.delete("e", to=3)
        assert sorted(await tester.ids()) == ["a", "c", "d", "e"]

    async def test_a_topic_without_journals_has_no_ids(self, tester: JournalTester) -> None:
        await tester.purge("a")
        with pytest.raises(Conflict):
            await tester.append("b", events(1), expected=9)
        assert await tester.ids() == []

    async def test_a_journal_purged_and_created_again_is_listed_once(self, tester: JournalTester) -> None:
        await tester.append("a", events(1))
        await tester.purge("a")
        await tester.append("a", events(1))
        assert await tester.ids() == ["a"]

    # ---- live tails

    async def test_a_tail_yields_existing_events_and_then_new_ones(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2))
        tail = tester.tail("a")
        assert [(await _next(tail)).payload for _ in range(2)] == [1, 2]
        next_event = asyncio.create_task(_next(tail))
        await tester.append("b", events("of another"))
        await tester.append("a", events(3))
        assert (await next_event).payload == 3
        await tail.aclose()  # type: ignore[attr-defined]

    async def test_a_tail_may_begin_before_the_journal(self, tester: JournalTester) -> None:
        tail = tester.tail("a")
        next_event = asyncio.create_task(_next(tail))
        await tester.append("a", events(1))
        assert (await next_event).payload == 1
        await tail.aclose()  # type: ignore[attr-defined]

    async def test_a_tail_begins_at_start(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2, 3))
        tail = tester.tail("a", start=3)
        assert (await _next(tail)).seq_nr == 3
        await tail.aclose()  # type: ignore[attr-defined]

    async def test_a_tail_skips_deleted_events(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2, 3))
        await tester.delete("a", to=2)
        tail = tester.tail("a")
        assert (await _next(tail)).seq_nr == 3
        await tail.aclose()  # type: ignore[attr-defined]

    async def test_a_tail_continues_with_the_next_incarnation(self, tester: JournalTester) -> None:
        await tester.append("a", events("old", "older"))
        tail = tester.tail("a")
        await _next(tail)
        await _next(tail)
        await tester.purge("a")
        next_event = asyncio.create_task(_next(tail))
        await tester.append("a", events("new", "newer"))
        new = [await next_event, await _next(tail)]
        assert [(event.seq_nr, event.payload) for event in new] == [(1, "new"), (2, "newer")]
        await tail.aclose()  # type: ignore[attr-defined]


async def _next(tail: Any) -> Any:
    return await asyncio.wait_for(anext(tail), CASE_TIMEOUT_S)
