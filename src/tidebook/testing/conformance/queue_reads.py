"""Test cases of a queue store: due dates, expired entries, listings, dead letters."""

from __future__ import annotations

import asyncio
from typing import cast

from tidebook.core.payload import TEXT
from tidebook.queue.browse import BrowsableStore, LetterFilter
from tidebook.queue.port import NEVER_MS, QueueStore
from tidebook.testing.conformance.queue_base import (
    LEASE_MS,
    START_MS,
    Advance,
    QueueBase,
    QueueTester,
    entry,
    new_queue,
)


class QueueReadCases(QueueBase):
    """Test cases of due dates, listings and counts."""

    async def test_an_empty_queue_has_nothing_due(self, tester: QueueTester) -> None:
        (due,) = await tester.store.due([tester.ref])
        assert (due.now_ms, due.ready, due.held, due.upcoming) == (START_MS, False, False, ())
        assert due.lease_end == NEVER_MS

    async def test_an_entry_that_is_due_now_is_ready(self, tester: QueueTester) -> None:
        await tester.put("k")
        (due,) = await tester.store.due([tester.ref])
        assert due.ready

    async def test_upcoming_process_dates_are_returned_in_order(self, tester: QueueTester) -> None:
        await tester.put("a", priority=9, process_at=START_MS + 300)
        await tester.put("b", priority=200, process_at=START_MS + 100)
        await tester.put("c", priority=9, process_at=START_MS + 200)
        (due,) = await tester.store.due([tester.ref])
        assert not due.ready
        assert due.upcoming == (START_MS + 100, START_MS + 200, START_MS + 300)

    async def test_the_end_of_a_held_lease_is_reported(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("k")
        await tester.take()
        (due,) = await tester.store.due([tester.ref])
        assert (due.ready, due.lease_end) == (False, START_MS + LEASE_MS)
        await advance(LEASE_MS)
        (due,) = await tester.store.due([tester.ref])
        assert due.ready

    async def test_an_entry_whose_key_is_held_is_not_ready(self, tester: QueueTester) -> None:
        await tester.put("k")
        taken = await tester.take()
        await tester.put("k")
        (due,) = await tester.store.due([tester.ref])
        assert (due.ready, due.held) == (False, True)
        await tester.finish(taken)
        (due,) = await tester.store.due([tester.ref])
        assert due.ready

    async def test_several_queues_are_read_in_one_call(self, store: QueueStore, tester: QueueTester) -> None:
        other = QueueTester(store, await new_queue(store, own_table=True))
        await other.put("k")
        dues = await store.due([tester.ref, other.ref, tester.ref])
        assert [due.ready for due in dues] == [False, True, False]

    async def test_expired_entries_are_swept(self, tester: QueueTester, advance: Advance) -> None:
        await tester.put("a", expires_at=START_MS + 10)
        await tester.put("b", expires_at=START_MS + 20)
        assert (await tester.store.sweep(tester.ref)).next_at == START_MS + 10
        await advance(10)
        swept = await tester.store.sweep(tester.ref)
        assert (swept.expired, swept.next_at) == (1, START_MS + 20)
        assert [each.key for each in await tester.store.entries(tester.ref, limit=9)] == ["b"]

    async def test_entries_are_listed_processed_ones_first(self, tester: QueueTester) -> None:
        await tester.put("a", priority=1)
        await tester.put("b", priority=3)
        await tester.put("c", priority=2)
        await tester.take()
        listed = await tester.store.entries(tester.ref, limit=9)
        assert [(each.key, each.status) for each in listed] == [("a", "P"), ("c", "W"), ("b", "W")]
        assert len(await tester.store.entries(tester.ref, limit=2)) == 2

    async def test_the_entries_of_a_queue_are_counted(self, tester: QueueTester, advance: Advance) -> None:
        await tester.store.put(tester.ref, [entry(f"{number}") for number in range(4)], inserted_at=0)
        await tester.put("later", process_at=START_MS + 60)
        await tester.take()
        await advance(50)
        counts = await tester.store.counts(tester.ref)
        assert (counts.due, counts.later, counts.processing, counts.dead) == (3, 1, 1, 0)
        assert (counts.oldest_due_ms, counts.next_at) == (50, START_MS)

    async def test_a_put_of_another_store_wakes_a_waiting_client(self, tester: QueueTester) -> None:
        wakes = tester.store.wakes()
        await asyncio.wait_for(anext(wakes), 10)
        sleeper = b"s" * 16
        await tester.store.sleep(sleeper, {tester.ref.id: (NEVER_MS, False)})
        waiting = asyncio.ensure_future(anext(wakes))
        await asyncio.sleep(0)
        await tester.put("k", process_at=START_MS + 77)
        wake = await asyncio.wait_for(waiting, 10)
        assert wake.queue == tester.ref.id
        assert wake.at in (START_MS + 77, None)
        await wakes.aclose()  # type: ignore[attr-defined]


class DeadLetterCases(QueueBase):
    """Test cases of dead letters, which can be edited, retried and dropped."""

    async def dead(self, store: QueueStore, key: str | None = "k") -> QueueTester:
        tester = QueueTester(store, await new_queue(store, max_timeouts=0))
        await tester.put(key, data="poison", priority=8)
        assert await tester.fail(await tester.take()) == "dead"
        return tester

    async def test_many_dead_letters_are_found_retried_in_order_and_dropped(self, store: QueueStore) -> None:
        browsing = cast(BrowsableStore, store)
        tester = QueueTester(store, await new_queue(store, max_timeouts=0))
        for name in ("a", "b", "c", "d"):
            await tester.put(name, data=name)
            await tester.fail(await tester.take())
        ids, more = await browsing.letter_ids(tester.ref, LetterFilter())
        assert (len(ids), more) == (4, None)
        assert ids == sorted(ids, reverse=True)
        [(only, _)] = [(await browsing.letter_ids(tester.ref, LetterFilter(key="b", reason="no")))]
        assert only == [ids[2]]
        assert await browsing.letter_ids(tester.ref, LetterFilter(reason="yes")) == ([], None)
        assert await browsing.retry_all(tester.ref, [ids[3], ids[2], ids[2], 10**9]) == 2
        assert await tester.names() == ["a", "b"]
        assert await browsing.drop_all(tester.ref, [ids[0], 10**9]) == 1
        assert [letter.key for letter in await store.dead_letters(tester.ref)] == ["c"]

    async def test_a_retried_dead_letter_starts_with_a_counter_of_0(self, store: QueueStore) -> None:
        tester = await self.dead(store)
        (letter,) = await store.dead_letters(tester.ref)
        assert await store.retry(tester.ref, letter.id)
        taken = await tester.take()
        assert (taken.name, taken.entry.key, taken.entry.priority, taken.entry.timeouts) == ("poison", "k", 8, 0)
        assert await store.dead_letters(tester.ref) == []
        assert not await store.retry(tester.ref, letter.id)

    async def test_a_retried_dead_letter_merges_with_a_waiting_entry_and_keeps_its_data(
        self, store: QueueStore, advance: Advance
    ) -> None:
        tester = await self.dead(store)
        await tester.put("k", data="new", priority=9, process_at=START_MS - 1, expires_at=START_MS + 50, inserted_at=7)
        (letter,) = await store.dead_letters(tester.ref)
        await store.edit(tester.ref, letter.id, TEXT, b"edited")
        await advance(3)
        await store.retry(tester.ref, letter.id)
        (taken,) = await tester.claim(5)
        found = taken.entry
        assert (taken.name, found.priority, found.process_at, found.timeouts) == ("new", 8, START_MS + 3, 0)
        assert (found.expires_at, found.inserted_at) == (NEVER_MS, 0)

    async def test_a_retried_dead_letter_merges_with_an_entry_whose_lease_expired(
        self, store: QueueStore, advance: Advance
    ) -> None:
        tester = QueueTester(store, await new_queue(store, max_timeouts=1))
        await tester.put("k", data="poison", priority=8)
        await tester.fail(await tester.take())
        assert await tester.fail(await tester.take()) == "dead"
        await tester.put("k", data="new", priority=9)
        late = await tester.take()
        await advance(LEASE_MS)
        await store.sweep(tester.ref)
        (letter,) = await store.dead_letters(tester.ref)
        await store.retry(tester.ref, letter.id)
        assert await tester.finish(late) == [False]
        (taken,) = await tester.claim(5)
        assert (taken.name, taken.entry.priority, taken.entry.timeouts) == ("new", 8, 0)

    async def test_a_retried_dead_letter_takes_the_data_of_the_entry_in_progress(self, store: QueueStore) -> None:
        tester = await self.dead(store)
        await tester.put("k", data="new")
        newer = await tester.take()
        (letter,) = await store.dead_letters(tester.ref)
        await store.retry(tester.ref, letter.id)
        assert await tester.claim() == []
        assert await tester.finish(newer) == [True]
        assert await tester.names() == ["new"]

    async def test_a_retried_dead_letter_ignores_an_expired_entry(self, store: QueueStore, advance: Advance) -> None:
        tester = await self.dead(store)
        await tester.put("k", data="new", expires_at=START_MS + 5)
        await advance(10)
        (letter,) = await store.dead_letters(tester.ref)
        await store.retry(tester.ref, letter.id)
        assert await tester.names() == ["poison"]

    async def test_a_dead_letter_is_edited(self, store: QueueStore) -> None:
        tester = await self.dead(store, key=None)
        (letter,) = await store.dead_letters(tester.ref)
        assert await store.edit(tester.ref, letter.id, TEXT, b"cured")
        await store.retry(tester.ref, letter.id)
        taken = await tester.take()
        assert (taken.name, taken.entry.kind) == ("cured", TEXT)

    async def test_a_dead_letter_is_dropped(self, store: QueueStore) -> None:
        tester = await self.dead(store)
        (letter,) = await store.dead_letters(tester.ref)
        assert await store.drop(tester.ref, letter.id)
        assert not await store.drop(tester.ref, letter.id)
        assert not await store.edit(tester.ref, letter.id, TEXT, b"")
        assert (await store.counts(tester.ref)).dead == 0

    async def test_a_dead_letter_is_announced_once(self, store: QueueStore) -> None:
        tester = await self.dead(store)
        ours = [letter.id for letter in await store.unannounced(limit=1_000) if letter.queue == tester.ref.name]
        assert len(ours) == 1
        await store.announced(ours)
        assert ours[0] not in [letter.id for letter in await store.unannounced(limit=1_000)]

    async def test_a_dead_letter_to_announce_is_given_to_one_process_at_a_time(
        self, store: QueueStore, advance: Advance
    ) -> None:
        tester = await self.dead(store)

        async def found() -> int:
            letters = await store.unannounced(limit=1_000, hold_ms=5_000)
            return len([letter for letter in letters if letter.queue == tester.ref.name])

        assert [await found(), await found()] == [1, 0]
        await advance(5_000)  # the first process did not confirm the announcement in time
        assert await found() == 1

    async def test_a_dead_letter_of_another_queue_is_not_changed(self, store: QueueStore) -> None:
        tester, other = await self.dead(store), await new_queue(store)
        (letter,) = await store.dead_letters(tester.ref)
        assert not await store.retry(other, letter.id)
        assert not await store.edit(other, letter.id, TEXT, b"")
        assert not await store.drop(other, letter.id)
        assert await store.dead_letters(tester.ref) == [letter]
