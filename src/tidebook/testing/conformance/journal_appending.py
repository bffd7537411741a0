"""Test cases of appending: numbers, conflicts, retries, many journals in one call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidebook.core.errors import Conflict, InvalidInput, OutcomeUnknown
from tidebook.core.event import Event
from tidebook.core.head import RECENT_MAX
from tidebook.core.seq_nr import LAST
from tidebook.journal.outcome import Appended
from tidebook.testing.conformance.journal_base import JournalSuite, JournalTester, events, numbers, payloads

ID = b"0123456789abcdef"


class AppendingCases(JournalSuite):
    """Test cases of the effect and the result of an append."""

    async def test_the_first_events_are_numbered_from_1(self, tester: JournalTester) -> None:
        done = await tester.append("a", events("x", "y"))
        assert (done.first, done.last) == (1, 2)
        assert numbers(await tester.read("a")) == [1, 2]

    async def test_events_follow_the_last_one(self, tester: JournalTester) -> None:
        await tester.append("a", events("x", "y"))
        done = await tester.append("a", events("z"))
        assert (done.first, done.last) == (3, 3)
        assert payloads(await tester.read("a")) == ["x", "y", "z"]

    async def test_an_append_returns_its_partition_and_offset(self, tester: JournalTester) -> None:
        first = await tester.append("a", events("x"))
        second = await tester.append("a", events("y"))
        assert first.partition == second.partition
        assert first.offset < second.offset
        assert [(e.partition, e.offset) for e in await tester.read("a")] == [
            (first.partition, first.offset),
            (second.partition, second.offset),
        ]

    async def test_expected_0_creates_a_journal(self, tester: JournalTester) -> None:
        assert (await tester.append("a", events("x"), expected=0)).last == 1

    async def test_an_append_that_expects_the_last_number_is_accepted(self, tester: JournalTester) -> None:
        await tester.append("a", events("x", "y"))
        assert (await tester.append("a", events("z"), expected=2)).first == 3

    @pytest.mark.parametrize("expected", [0, 1, 3, LAST])
    async def test_any_other_expected_number_is_a_conflict_with_expected_and_found(
        self, tester: JournalTester, expected: int
    ) -> None:
        await tester.append("a", events("x", "y"))
        with pytest.raises(Conflict) as caught:
            await tester.append("a", events("lost"), expected=expected)
        assert (caught.value.expected, caught.value.at, caught.value.found) == (expected, None, 2)
        assert str(caught.value.key) == f"{tester.topic}/a"
        assert payloads(await tester.read("a")) == ["x", "y"]

    async def test_a_missing_journal_conflicts_with_any_expected_number_but_0(self, tester: JournalTester) -> None:
        with pytest.raises(Conflict) as caught:
            await tester.append("a", events("lost"), expected=1)
        assert caught.value.found == 0
        assert await tester.pointer("a") is None

    async def test_at_may_skip_numbers(self, tester: JournalTester) -> None:
        await tester.append("a", events("x"))
        done = await tester.append("a", events("y", "z"), at=4)
        assert (done.first, done.last) == (4, 5)
        assert numbers(await tester.read("a")) == [1, 4, 5]

    async def test_at_creates_a_journal_that_does_not_begin_at_1(self, tester: JournalTester) -> None:
        await tester.append("a", events("x"), at=7)
        assert numbers(await tester.read("a")) == [7]

    @pytest.mark.parametrize("at", [1, 2])
    async def test_at_a_number_that_is_taken_is_a_conflict(self, tester: JournalTester, at: int) -> None:
        await tester.append("a", events("x", "y"))
        with pytest.raises(Conflict) as caught:
            await tester.append("a", events("lost"), at=at)
        assert (caught.value.expected, caught.value.at, caught.value.found) == (None, at, 2)
        assert payloads(await tester.read("a")) == ["x", "y"]

    async def test_nothing_can_follow_the_largest_sequence_number(self, tester: JournalTester) -> None:
        await tester.append("a", events("x"), at=LAST)
        with pytest.raises(Conflict) as caught:
            await tester.append("a", events("y"))
        assert caught.value.found == LAST

    async def test_payloads_tags_and_metadata_are_read_unchanged(self, tester: JournalTester) -> None:
        new: list[Event[Any]] = [
            Event({"n": [1, 2.5, None, True], "t": "ä"}, tags={"b", "a"}, metadata={"by": "me"}),
            Event("text"),
            Event(b"\x00\xff"),
            Event(None, metadata={}),
        ]
        await tester.append("a", new)
        assert [Event(e.payload, tags=e.tags, metadata=e.metadata) for e in await tester.read("a")] == new

    async def test_journals_of_one_topic_do_not_mix(self, tester: JournalTester) -> None:
        for i in range(8):
            await tester.append(f"j{i}", events(i))
        for i in range(8):
            assert payloads(await tester.read(f"j{i}")) == [i]

    async def test_concurrent_appends_are_all_read_in_log_order(self, tester: JournalTester) -> None:
        done = await asyncio.gather(*(tester.append("a", events(i)) for i in range(20)))
        assert sorted(each.last or 0 for each in done) == list(range(1, 21))
        read = await tester.read("a")
        assert sorted(payloads(read)) == list(range(20))
        by_number = {each.last: i for i, each in enumerate(done)}
        assert payloads(read) == [by_number[number] for number in range(1, 21)]

    async def test_exactly_one_of_many_appends_with_the_same_expectation_wins(self, tester: JournalTester) -> None:
        tries = (tester.append("a", events(i), expected=0) for i in range(10))
        done = await asyncio.gather(*tries, return_exceptions=True)
        won = [i for i, each in enumerate(done) if isinstance(each, Appended)]
        assert [type(each) for each in done if not isinstance(each, Appended)] == [Conflict] * 9
        assert payloads(await tester.read("a")) == won

    async def test_events_appended_without_confirmation_are_readable(self, tester: JournalTester) -> None:
        done = await tester.append("a", events("x"), confirm=False)
        assert done.offset >= 0
        assert payloads(await tester.read("a")) == ["x"]

    # ---- many journals in one call

    async def test_many_journals_in_one_call_each_get_their_events(self, tester: JournalTester) -> None:
        done = await tester.append_many([(f"j{i}", events(i, -i)) for i in range(6)])
        assert [each.last for each in done] == [2] * 6
        assert payloads(await tester.read("j5")) == [5, -5]

    async def test_one_journal_many_times_in_one_call_keeps_the_order(self, tester: JournalTester) -> None:
        done = await tester.append_many([("a", events(i)) for i in range(5)])
        assert [each.first for each in done] == [1, 2, 3, 4, 5]
        assert payloads(await tester.read("a")) == [0, 1, 2, 3, 4]

    async def test_bad_input_in_one_of_many_sends_none(self, tester: JournalTester) -> None:
        with pytest.raises(InvalidInput):
            await tester.append_many([("a", events("x")), ("", events("y"))])
        assert await tester.pointer("a") is None

    # ---- idempotence

    async def test_an_append_id_that_is_used_again_gives_the_first_result(self, tester: JournalTester) -> None:
        first = await tester.append("a", events("x"), append_id=ID)
        await tester.append("a", events("y"))
        assert await tester.append("a", events("x"), append_id=ID) == first
        assert payloads(await tester.read("a")) == ["x", "y"]

    async def test_a_repeated_append_with_an_expectation_gives_the_first_result(self, tester: JournalTester) -> None:
        first = await tester.append("a", events("x"), expected=0, append_id=ID)
        assert await tester.append("a", events("x"), expected=0, append_id=ID) == first

    async def test_a_repeat_after_a_purge_gives_the_first_result_and_brings_nothing_back(
        self, tester: JournalTester
    ) -> None:
        first = await tester.append("a", events("x"), append_id=ID)
        await tester.purge("a")
        assert await tester.append("a", events("x"), append_id=ID) == first
        assert await tester.read("a") == []

    async def test_the_same_id_in_another_journal_is_another_append(self, tester: JournalTester) -> None:
        await tester.append("a", events("x"), append_id=ID)
        await tester.append("b", events("y"), append_id=ID)
        assert payloads(await tester.read("b")) == ["y"]

    async def test_a_retry_that_is_too_late_raises_and_appends_nothing(self, tester: JournalTester) -> None:
        await tester.append("a", events("first"), append_id=ID)
        for i in range(RECENT_MAX + 1):
            await tester.append("a", events(i))
        late = OutcomeUnknown("no answer", append_id=ID, floor=0, epoch=1)
        with pytest.raises(OutcomeUnknown, match="too late") as caught:
            await tester.append("a", events("first"), retry=late)
        assert caught.value.append_id == ID
        assert await tester.pointer("a") == RECENT_MAX + 2

    async def test_a_retry_in_time_gives_the_first_result(self, tester: JournalTester) -> None:
        first = await tester.append("a", events("x"), append_id=ID)
        for i in range(RECENT_MAX - 1):
            await tester.append("a", events(i))
        again = OutcomeUnknown("no answer", append_id=ID, floor=0, epoch=1)
        assert await tester.append("a", events("x"), retry=again) == first

    async def test_a_retry_of_an_append_that_never_arrived_appends_it(self, tester: JournalTester) -> None:
        lost = OutcomeUnknown("no answer", append_id=ID, floor=0, epoch=1)
        assert (await tester.append("a", events("x"), retry=lost)).last == 1
