"""Test cases of several books on the same data: each sees the others' appends, and log order decides conflicts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tidebook.core.errors import Conflict
from tidebook.testing.conformance.journal_base import CASE_TIMEOUT_S, JournalSuite, JournalTester, events, payloads

OpenTester = Callable[..., AbstractAsyncContextManager[JournalTester]]


class RacingCases(JournalSuite):
    """Test cases of concurrent use of one journal by several books."""

    async def test_a_book_opened_again_has_everything(self, open_tester: OpenTester) -> None:
        async with open_tester() as first:
            await first.append("a", events(1, 2))
            await first.delete("a", to=1)
            await first.book.__aexit__(None, None, None)
        async with open_tester() as second:
            assert payloads(await second.read("a")) == [2]
            assert (await second.append("a", events(3), expected=2)).first == 3

    async def test_a_read_sees_appends_acknowledged_to_another_book(self, open_tester: OpenTester) -> None:
        async with open_tester() as one, open_tester() as other:
            for i in range(6):
                writer, reader = (one, other) if i % 2 else (other, one)
                await writer.append("a", events(i))
                assert payloads(await reader.read("a")) == list(range(i + 1))
                assert await reader.pointer("a") == i + 1

    async def test_an_append_of_another_book_causes_a_conflict(self, open_tester: OpenTester) -> None:
        async with open_tester() as one, open_tester() as other:
            await one.append("a", events(1))
            await other.append("a", events(2))
            with pytest.raises(Conflict) as caught:
                await one.append("a", events("lost"), expected=1)
            assert caught.value.found == 2

    async def test_a_purge_by_another_book_is_seen(self, open_tester: OpenTester) -> None:
        async with open_tester() as one, open_tester() as other:
            await one.append("a", events(1, 2))
            assert await other.pointer("a") == 2
            await one.purge("a")
            assert await other.pointer("a") is None
            assert (await other.append("a", events("new"), expected=0)).first == 1
            assert payloads(await one.read("a")) == ["new"]

    async def test_exactly_one_of_two_racing_books_wins_each_number(self, open_tester: OpenTester) -> None:
        async with open_tester() as one, open_tester() as other:
            won: dict[int, str] = {}
            lost: list[tuple[int, int]] = []

            async def race(tester: JournalTester, name: str) -> None:
                last = 0
                while last < 15:
                    try:
                        done = await tester.append("a", events(name), expected=last)
                    except Conflict as conflict:
                        lost.append((last, conflict.found or 0))  # never None here, because nothing is purged
                        last = conflict.found or 0
                    else:
                        assert done.last == last + 1
                        assert done.last not in won
                        last = done.last
                        won[last] = name

            await asyncio.wait_for(asyncio.gather(race(one, "one"), race(other, "other")), CASE_TIMEOUT_S)
            assert all(found > expected for expected, found in lost)
            read = await one.read("a")
            assert payloads(read) == payloads(await other.read("a"))
            assert {event.seq_nr: event.payload for event in read} == won

    async def test_a_tail_is_woken_by_another_books_append(self, open_tester: OpenTester) -> None:
        async with open_tester() as one, open_tester() as other:
            await one.append("a", events(1))
            tail = other.tail("a")
            assert (await asyncio.wait_for(anext(tail), CASE_TIMEOUT_S)).payload == 1
            next_event = asyncio.ensure_future(anext(tail))
            await one.append("a", events(2))
            assert (await asyncio.wait_for(next_event, CASE_TIMEOUT_S)).payload == 2
            await tail.aclose()  # type: ignore[attr-defined]

    async def test_snapshots_are_shared(self, open_tester: OpenTester) -> None:
        async with open_tester() as one, open_tester() as other:
            await one.append("a", events(1))
            await one.save_snapshot("a", seq_nr=1, payload="state")
            found = await other.load_snapshot("a")
            assert found is not None
            assert found.payload == "state"

    async def test_a_topic_keeps_the_configuration_it_was_created_with(self, open_tester: OpenTester) -> None:
        async with open_tester() as one:
            config = await one.journal.create()
            await one.append("a", events(*range(7)))
            async with open_tester(partitions=7, segment_size=2, limit_bytes=5000) as other:
                assert await other.journal.create() == config
                assert payloads(await other.read("a")) == list(range(7))

    async def test_readers_see_whole_journals_while_others_write_and_replicate(self, open_tester: OpenTester) -> None:
        async with open_tester() as writer, open_tester() as reader, open_tester() as replicator:
            over = asyncio.Event()

            async def write() -> None:
                for i in range(30):
                    await writer.append("a", events(2 * i, 2 * i + 1))
                over.set()

            async def read() -> None:
                while not over.is_set():
                    seen = payloads(await reader.read("a"))
                    assert seen == list(range(len(seen)))
                    assert len(seen) % 2 == 0
                    await asyncio.sleep(0)

            async def copy() -> None:
                while not over.is_set():
                    await replicator.replicate(batch_records=3, batches_max=1)
                    await asyncio.sleep(0)

            await writer.append("b", events("so that the topic is there"))
            await asyncio.wait_for(asyncio.gather(write(), read(), copy()), CASE_TIMEOUT_S)
            assert payloads(await reader.read("a")) == list(range(60))
