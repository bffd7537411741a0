"""Test cases of a queue store: due dates, expired entries, listings, dead letters."""

from __future__ import annotations

import asyncio
from typing import cast

from tidebook.core.payload import TEXT
from tidebook.queue.browse import BrowsableStore, LetterFilter
from tidebook.queue.port import NEVER_MS, QueueStore
from tidebook.testing.conformance.queue_base import LEASE_MS, START_MS, Advance, Desk, QueueBase, entry, new_queue


class QueueReadCases(QueueBase):
    """Test cases of due dates, listings and counts."""

    async def test_an_empty_queue_has_nothing_due(self, desk: Desk) -> None:
        (due,) = await desk.store.due([desk.ref])
        assert (due.now_ms, due.ready, due.held, due.upcoming) == (START_MS, False, False, ())
        assert due.lease_end == NEVER_MS

    async def test_an_entry_that_is_due_now_is_ready(self, desk: Desk) -> None:
        await desk.put("k")
        (due,) = await desk.store.due([desk.ref])
        assert due.ready

    async def test_upcoming_process_dates_are_returned_in_order(self, desk: Desk) -> None:
        await desk.put("a", priority=9, process_at=START_MS + 300)
        await desk.put("b", priority=200, process_at=START_MS + 100)
        await desk.put("c", priority=9, process_at=START_MS + 200)
        (due,) = await desk.store.due([desk.ref])
        assert not due.ready
        assert due.upcoming == (START_MS + 100, START_MS + 200, START_MS + 300)

    async def test_the_end_of_a_held_lease_is_reported(self, desk: Desk, advance: Advance) -> None:
        await desk.put("k")
        await desk.take()
        (due,) = await desk.store.due([desk.ref])
        assert (due.ready, due.lease_end) == (False, START_MS + LEASE_MS)
        await advance(LEASE_MS)
        (due,) = await desk.store.due([desk.ref])
        assert due.ready

    async def test_an_entry_whose_key_is_held_is_not_ready(self, desk: Desk) -> None:
        await desk.put("k")
        taken = await desk.take()
        await desk.put("k")
        (due,) = await desk.store.due([desk.ref])
        assert (due.ready, due.held) == (False, True)
        await desk.finish(taken)
        (due,) = await desk.store.due([desk.ref])
        assert due.ready

    async def test_several_queues_are_read_in_one_call(self, store: QueueStore, desk: Desk) -> None:
        other = Desk(store, await new_queue(store, own_table=True))
        await other.put("k")
        dues = await store.due([desk.ref, other.ref, desk.ref])
        assert [due.ready for due in dues] == [False, True, False]

    async def test_expired_entries_are_swept(self, desk: Desk, advance: Advance) -> None:
        await desk.put("a", expires_at=START_MS + 10)
        await desk.put("b", expires_at=START_MS + 20)
        assert (await desk.store.sweep(desk.ref)).next_at == START_MS + 10
        await advance(10)
        swept = await desk.store.sweep(desk.ref)
        assert (swept.expired, swept.next_at) == (1, START_MS + 20)
        assert [each.key for each in await desk.store.entries(desk.ref, limit=9)] == ["b"]

    async def test_entries_are_listed_processed_ones_first(self, desk: Desk) -> None:
        await desk.put("a", priority=1)
        await desk.put("b", priority=3)
        await desk.put("c", priority=2)
        await desk.take()
        listed = await desk.store.entries(desk.ref, limit=9)
        assert [(each.key, each.status) for each in listed] == [("a", "P"), ("c", "W"), ("b", "W")]
        assert len(await desk.store.entries(desk.ref, limit=2)) == 2

    async def test_the_entries_of_a_queue_are_counted(self, desk: Desk, advance: Advance) -> None:
        await desk.store.put(desk.ref, [entry(f"{number}") for number in range(4)], inserted_at=0)
        await desk.put("later", process_at=START_MS + 60)
        await desk.take()
        await advance(50)
        counts = await desk.store.counts(desk.ref)
        assert (counts.due, counts.later, counts.processing, counts.dead) == (3, 1, 1, 0)
        assert (counts.oldest_due_ms, counts.next_at) == (50, START_MS)

    async def test_a_put_of_another_store_wakes_a_waiting_client(self, desk: Desk) -> None:
        wakes = desk.store.wakes()
        await asyncio.wait_for(anext(wakes), 10)
        sleeper = b"s" * 16
        await desk.store.sleep(sleeper, {desk.ref.id: (NEVER_MS, False)})
        waiting = asyncio.ensure_future(anext(wakes))
        await asyncio.sleep(0)
        await desk.put("k", process_at=START_MS + 77)
        wake = await asyncio.wait_for(waiting, 10)
        assert wake.queue == desk.ref.id
        assert wake.at in (START_MS + 77, None)
        await wakes.aclose()  # type: ignore[attr-defined]


class DeadLetterCases(QueueBase):
    """Test cases of dead letters, which can be edited, retried and dropped."""

    async def dead(self, store: QueueStore, key: str | None = "k") -> Desk:
        desk = Desk(store, await new_queue(store, max_timeouts=0))
        await desk.put(key, data="poison", priority=8)
        assert await desk.fail(await desk.take()) == "dead"
        return desk

    async def test_many_dead_letters_are_found_retried_in_order_and_dropped(self, store: QueueStore) -> None:
        browsing = cast(BrowsableStore, store)
        desk = Desk(store, await new_queue(store, max_timeouts=0))
        for name in ("a", "b", "c", "d"):
            await desk.put(name, data=name)
            await desk.fail(await desk.take())
        ids, more = await browsing.letter_ids(desk.ref, LetterFilter())
        assert (len(ids), more) == (4, None)
        assert ids == sorted(ids, reverse=True)
        [(only, _)] = [(await browsing.letter_ids(desk.ref, LetterFilter(key="b", reason="no")))]
        assert only == [ids[2]]
        assert await browsing.letter_ids(desk.ref, LetterFilter(reason="yes")) == ([], None)
        assert await browsing.retry_all(desk.ref, [ids[3], ids[2], ids[2], 10**9]) == 2
        assert await desk.names() == ["a", "b"]
        assert await browsing.drop_all(desk.ref, [ids[0], 10**9]) == 1
        assert [letter.key for letter in await store.dead_letters(desk.ref)] == ["c"]

    async def test_a_retried_dead_letter_starts_with_a_counter_of_0(self, store: QueueStore) -> None:
        desk = await self.dead(store)
        (letter,) = await store.dead_letters(desk.ref)
        assert await store.retry(desk.ref, letter.id)
        taken = await desk.take()
        assert (taken.name, taken.entry.key, taken.entry.priority, taken.entry.timeouts) == ("poison", "k", 8, 0)
        assert await store.dead_letters(desk.ref) == []
        assert not await store.retry(desk.ref, letter.id)

    async def test_a_retried_dead_letter_merges_with_a_waiting_entry_and_keeps_its_data(
        self, store: QueueStore, advance: Advance
    ) -> None:
        desk = await self.dead(store)
        await desk.put("k", data="new", priority=9, process_at=START_MS - 1, expires_at=START_MS + 50, inserted_at=7)
        (letter,) = await store.dead_letters(desk.ref)
        await store.edit(desk.ref, letter.id, TEXT, b"edited")
        await advance(3)
        await store.retry(desk.ref, letter.id)
        (taken,) = await desk.claim(5)
        found = taken.entry
        assert (taken.name, found.priority, found.process_at, found.timeouts) == ("new", 8, START_MS + 3, 0)
        assert (found.expires_at, found.inserted_at) == (NEVER_MS, 0)

    async def test_a_retried_dead_letter_merges_with_an_entry_whose_lease_expired(
        self, store: QueueStore, advance: Advance
    ) -> None:
        desk = Desk(store, await new_queue(store, max_timeouts=1))
        await desk.put("k", data="poison", priority=8)
        await desk.fail(await desk.take())
        assert await desk.fail(await desk.take()) == "dead"
        await desk.put("k", data="new", priority=9)
        late = await desk.take()
        await advance(LEASE_MS)
        await store.sweep(desk.ref)
        (letter,) = await store.dead_letters(desk.ref)
        await store.retry(desk.ref, letter.id)
        assert await desk.finish(late) == [False]
        (taken,) = await desk.claim(5)
        assert (taken.name, taken.entry.priority, taken.entry.timeouts) == ("new", 8, 0)

    async def test_a_retried_dead_letter_takes_the_data_of_the_entry_in_progress(self, store: QueueStore) -> None:
        desk = await self.dead(store)
        await desk.put("k", data="new")
        newer = await desk.take()
        (letter,) = await store.dead_letters(desk.ref)
        await store.retry(desk.ref, letter.id)
        assert await desk.claim() == []
        assert await desk.finish(newer) == [True]
        assert await desk.names() == ["new"]

    async def test_a_retried_dead_letter_ignores_an_expired_entry(self, store: QueueStore, advance: Advance) -> None:
        desk = await self.dead(store)
        await desk.put("k", data="new", expires_at=START_MS + 5)
        await advance(10)
        (letter,) = await store.dead_letters(desk.ref)
        await store.retry(desk.ref, letter.id)
        assert await desk.names() == ["poison"]

    async def test_a_dead_letter_is_edited(self, store: QueueStore) -> None:
        desk = await self.dead(store, key=None)
        (letter,) = await store.dead_letters(desk.ref)
        assert await store.edit(desk.ref, letter.id, TEXT, b"cured")
        await store.retry(desk.ref, letter.id)
        taken = await desk.take()
        assert (taken.name, taken.entry.kind) == ("cured", TEXT)

    async def test_a_dead_letter_is_dropped(self, store: QueueStore) -> None:
        desk = await self.dead(store)
        (letter,) = await store.dead_letters(desk.ref)
        assert await store.drop(desk.ref, letter.id)
        assert not await store.drop(desk.ref, letter.id)
        assert not await store.edit(desk.ref, letter.id, TEXT, b"")
        assert (await store.counts(desk.ref)).dead == 0

    async def test_a_dead_letter_is_announced_once(self, store: QueueStore) -> None:
        desk = await self.dead(store)
        ours = [letter.id for letter in await store.unannounced(limit=1_000) if letter.queue == desk.ref.name]
        assert len(ours) == 1
        await store.announced(ours)
        assert ours[0] not in [letter.id for letter in await store.unannounced(limit=1_000)]

    async def test_a_dead_letter_to_announce_is_given_to_one_process_at_a_time(
        self, store: QueueStore, advance: Advance
    ) -> None:
        desk = await self.dead(store)

        async def found() -> int:
            letters = await store.unannounced(limit=1_000, hold_ms=5_000)
            return len([letter for letter in letters if letter.queue == desk.ref.name])

        assert [await found(), await found()] == [1, 0]
        await advance(5_000)  # the first process did not confirm the announcement in time
        assert await found() == 1

    async def test_a_dead_letter_of_another_queue_is_not_changed(self, store: QueueStore) -> None:
        desk, other = await self.dead(store), await new_queue(store)
        (letter,) = await store.dead_letters(desk.ref)
        assert not await store.retry(other, letter.id)
        assert not await store.edit(other, letter.id, TEXT, b"")
        assert not await store.drop(other, letter.id)
        assert await store.dead_letters(desk.ref) == [letter]
