"""Test cases of deletes, purges, new incarnations, expiry, and snapshots, which belong to one incarnation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tidebook.core.action import NEVER
from tidebook.core.errors import Conflict, InvalidInput, NotFound
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.testing.conformance.journal_base import JournalSuite, JournalTester, events, numbers, payloads


class LifecycleCases(JournalSuite):
    """Test cases of deletes, purges, expiry and snapshots."""

    async def test_deleted_events_are_gone_and_the_rest_is_there(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(1, 13)))
        await tester.delete("a", to=7)
        assert numbers(await tester.read("a")) == [8, 9, 10, 11, 12]
        assert await tester.pointer("a") == 12

    async def test_a_delete_never_removes_future_events(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2))
        await tester.delete("a", to=99)
        assert await tester.read("a") == []
        assert (await tester.append("a", events(3))).first == 3
        assert payloads(await tester.read("a")) == [3]

    async def test_a_smaller_delete_after_a_larger_one_brings_nothing_back(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2, 3))
        await tester.delete("a", to=2)
        await tester.delete("a", to=1)
        assert numbers(await tester.read("a")) == [3]

    async def test_a_delete_over_a_jump_leaves_the_events_after_it(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2))
        await tester.append("a", events(3, 4, 5), at=10**12)
        await tester.delete("a", to=10**12)
        assert payloads(await tester.read("a")) == [4, 5]

    async def test_a_delete_without_a_journal_creates_one_that_begins_after_it(self, tester: JournalTester) -> None:
        await tester.delete("a", to=7)
        assert await tester.pointer("a") == 7
        assert await tester.read("a") == []
        with pytest.raises(Conflict) as caught:
            await tester.append("a", events(1), expected=0)
        assert caught.value.found == 7
        assert (await tester.append("a", events(8), expected=7)).first == 8
        assert numbers(await tester.read("a")) == [8]

    async def test_an_expected_number_still_holds_after_everything_is_deleted(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2))
        await tester.delete("a", to=2)
        assert (await tester.append("a", events(3), expected=2)).first == 3

    async def test_a_purged_journal_does_not_exist(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(12)))
        await tester.purge("a")
        assert await tester.read("a") == []
        assert await tester.pointer("a") is None

    async def test_a_purge_without_a_journal_changes_nothing(self, tester: JournalTester) -> None:
        await tester.purge("a")
        assert await tester.pointer("a") is None
        assert (await tester.append("a", events(1), expected=0)).first == 1

    async def test_the_next_incarnation_begins_at_1_without_the_old_events(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(12)))
        await tester.delete("a", to=3)
        await tester.purge("a")
        assert (await tester.append("a", events("new"), expected=0)).first == 1
        assert payloads(await tester.read("a")) == ["new"]

    async def test_the_next_incarnation_may_grow_past_the_old_one(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(7)))
        await tester.purge("a")
        for i in range(5):
            await tester.append("a", events(f"{i}a", f"{i}b"))
        assert payloads(await tester.read("a")) == [f"{i}{c}" for i in range(5) for c in "ab"]

    async def test_many_incarnations_follow_one_another(self, tester: JournalTester) -> None:
        for incarnation in range(5):
            await tester.append("a", events(*[f"{incarnation}.{i}" for i in range(incarnation + 2)]))
            assert payloads(await tester.read("a")) == [f"{incarnation}.{i}" for i in range(incarnation + 2)]
            await tester.purge("a")
            assert await tester.read("a") == []

    async def test_a_delete_after_a_purge_creates_a_journal_that_begins_after_it(self, tester: JournalTester) -> None:
        await tester.append("a", events(1, 2))
        await tester.purge("a")
        await tester.delete("a", to=4)
        assert (await tester.append("a", events(5))).first == 5
        assert numbers(await tester.read("a")) == [5]

    # ---- expiry, which the pipeline's purge job acts on

    async def _head(self, tester: JournalTester, id: str) -> Head:
        await tester.replicate()
        head = await tester.book.store.head(Key(tester.topic, id))
        assert head is not None
        return head

    async def _expired(self, tester: JournalTester, *, now_ms: int) -> list[str]:
        await tester.replicate()
        return [id async for id, _ in tester.book.store.expired(tester.topic, now_ms=now_ms)]

    async def test_a_journal_expires_at_the_given_time_after_its_last_append(self, tester: JournalTester) -> None:
        await tester.append("a", events(1), expire_after=timedelta(minutes=1))
        await tester.append("b", events(1))
        (event,) = await tester.read("a")
        assert (await self._head(tester, "a")).expires_at_ms == event.timestamp_ms + 60_000
        assert await self._expired(tester, now_ms=event.timestamp_ms + 59_999) == []
        assert await self._expired(tester, now_ms=event.timestamp_ms + 60_000) == ["a"]

    async def test_an_append_postpones_the_expiry_and_can_remove_it(self, tester: JournalTester) -> None:
        await tester.append("a", events(1), expire_after=timedelta(minutes=1))
        await tester.append("a", events(2))
        last = (await tester.read("a"))[-1]
        assert (await self._head(tester, "a")).expires_at_ms == last.timestamp_ms + 60_000
        await tester.append("a", events(3), expire_after=NEVER)
        assert (await self._head(tester, "a")).expires_at_ms is None

    async def test_an_expiry_purges_the_journal_that_was_found_expired(self, tester: JournalTester) -> None:
        await tester.append("a", events(1), expire_after=timedelta(milliseconds=1))
        assert await tester.journal.purge_expired("a", await self._head(tester, "a"))
        assert await tester.pointer("a") is None

    async def test_a_fresh_append_wins_over_an_expiry(self, tester: JournalTester) -> None:
        await tester.append("a", events(1), expire_after=timedelta(milliseconds=1))
        expired = await self._head(tester, "a")
        await tester.append("a", events(2))
        assert not await tester.journal.purge_expired("a", expired)
        assert payloads(await tester.read("a")) == [1, 2]

    async def test_a_new_incarnation_of_the_same_size_wins_over_the_expiry_of_the_old(
        self, tester: JournalTester
    ) -> None:
        await tester.append("a", events(1), expire_after=timedelta(milliseconds=1))
        expired = await self._head(tester, "a")
        await tester.purge("a")
        await tester.append("a", events("new"))
        assert not await tester.journal.purge_expired("a", expired)
        assert payloads(await tester.read("a")) == ["new"]

    # ---- snapshots

    async def test_the_newest_snapshot_is_loaded(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(9)))
        for number in (2, 8, 5):
            await tester.save_snapshot("a", seq_nr=number, payload={"at": number})
        found = await tester.load_snapshot("a")
        assert found is not None
        assert (found.seq_nr, found.payload) == (8, {"at": 8})

    @pytest.mark.parametrize("payload", [b"\x00", "text", {"a": [1]}, None], ids=repr)
    async def test_a_snapshot_is_loaded_unchanged(self, tester: JournalTester, payload: Any) -> None:
        await tester.append("a", events(1))
        await tester.save_snapshot("a", seq_nr=1, payload=payload)
        found = await tester.load_snapshot("a")
        assert found is not None
        assert found.payload == payload
        assert type(found.payload) is type(payload)

    async def test_the_newest_snapshot_at_or_below_a_number_can_be_loaded(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(9)))
        for number in (2, 5, 8):
            await tester.save_snapshot("a", seq_nr=number, payload=number)
        found = [await tester.load_snapshot("a", to=to) for to in (8, 7, 4, 1)]
        assert [each and each.seq_nr for each in found] == [8, 5, 2, None]

    async def test_a_snapshot_of_the_same_number_is_overwritten(self, tester: JournalTester) -> None:
        await tester.append("a", events(1))
        await tester.save_snapshot("a", seq_nr=1, payload="old")
        await tester.save_snapshot("a", seq_nr=1, payload="new")
        found = await tester.load_snapshot("a")
        assert found is not None
        assert found.payload == "new"

    async def test_only_the_newest_snapshots_are_kept(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(9)))
        for number in (1, 2, 3, 4, 5):
            await tester.save_snapshot("a", seq_nr=number, payload=number)
        found = [await tester.load_snapshot("a", to=to) for to in (5, 4, 3, 2)]
        assert [each and each.seq_nr for each in found] == [5, 4, 3, None]

    async def test_a_snapshot_is_loaded_after_later_appends_and_deletes(self, tester: JournalTester) -> None:
        await tester.append("a", events(1))
        await tester.append("a", events(2))
        await tester.save_snapshot("a", seq_nr=2, payload="at 2")
        for turn in range(3):
            await tester.append("a", events(turn))
            found = await tester.load_snapshot("a")
            assert found is not None
            assert (found.seq_nr, found.payload) == (2, "at 2")
            await (tester.replicate() if turn else tester.delete("a", to=1))

    async def test_a_snapshot_of_an_earlier_incarnation_is_never_loaded(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(3)))
        await tester.save_snapshot("a", seq_nr=2, payload="old")
        await tester.replicate()
        await tester.purge("a")
        await tester.append("a", events(*range(5)))
        assert await tester.load_snapshot("a") is None
        await tester.replicate()
        assert await tester.load_snapshot("a") is None
        await tester.save_snapshot("a", seq_nr=4, payload="new")
        assert await tester.load_snapshot("a", to=3) is None

    async def test_deleted_snapshots_are_gone(self, tester: JournalTester) -> None:
        await tester.append("a", events(*range(9)))
        for number in (2, 5, 8):
            await tester.save_snapshot("a", seq_nr=number, payload=number)
        await tester.delete_snapshots("a", to=5)
        assert await tester.load_snapshot("a", to=7) is None
        await tester.delete_snapshots("a")
        assert await tester.load_snapshot("a") is None

    async def test_a_purge_removes_the_snapshots_and_the_next_incarnation_has_its_own(
        self, tester: JournalTester
    ) -> None:
        await tester.append("a", events(*range(5)))
        await tester.save_snapshot("a", seq_nr=5, payload="old")
        await tester.purge("a")
        assert await tester.load_snapshot("a") is None
        await tester.append("a", events("new"))
        assert await tester.load_snapshot("a") is None
        await tester.save_snapshot("a", seq_nr=1, payload="new")
        await tester.replicate()
        found = await tester.load_snapshot("a")
        assert found is not None
        assert found.payload == "new"

    async def test_a_snapshot_of_a_missing_journal_is_refused(self, tester: JournalTester) -> None:
        with pytest.raises(NotFound):
            await tester.save_snapshot("a", seq_nr=1, payload=1)
        assert await tester.load_snapshot("a") is None
        await tester.append("a", events(1))
        with pytest.raises(InvalidInput, match="beyond"):
            await tester.save_snapshot("a", seq_nr=2, payload=1)
