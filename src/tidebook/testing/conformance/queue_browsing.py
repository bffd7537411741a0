"""Test cases of a queue store: bounded listings, counts up to a limit, claims, removal, and pages of dead letters."""

from __future__ import annotations

from typing import cast

from tidebook.queue.browse import BrowsableStore, BrowsedEntry, EntryFilter, EntryPlace, LetterFilter
from tidebook.testing.conformance.queue_base import LEASE_MS, START_MS, Advance, QueueBase, QueueTester


def _browser(tester: QueueTester) -> BrowsableStore:
    return cast(BrowsableStore, tester.store)


def _names(found: list[BrowsedEntry]) -> list[str]:
    return [each.row.data.decode() for each in found]


class BrowsingCases(QueueBase):
    """Test cases of the bounded listings that the console shows."""

    async def _fill(self, tester: QueueTester) -> None:
        await tester.put("slow", priority=200)
        await tester.put("first", priority=10)
        await tester.put("second", priority=10)
        await tester.put("later", priority=10, process_at=START_MS + 500)
        await tester.put("much-later", priority=200, process_at=START_MS + 900)
        await tester.put("gone", priority=1, expires_at=START_MS - 1)

    async def test_pages_follow_the_claim_order_and_continue_after_a_place(self, tester: QueueTester) -> None:
        await self._fill(tester)
        browser, wanted = _browser(tester), EntryFilter(state="due")
        found = await browser.browse(tester.ref, wanted)
        assert _names(found) == ["first", "second", "slow"]
        after: EntryPlace | None = None
        pages = []
        while page := await browser.browse(tester.ref, wanted, after=after, limit=1):
            pages += _names(page)
            after = page[-1].place
        assert pages == ["first", "second", "slow"]

    async def test_entries_are_listed_by_date_priority_and_key(self, tester: QueueTester, advance: Advance) -> None:
        await self._fill(tester)
        browser = _browser(tester)

        async def names(**fields: object) -> list[str]:
            return _names(await browser.browse(tester.ref, EntryFilter(**fields)))  # type: ignore[arg-type]

        assert await names(state="later") == ["later", "much-later"]
        assert await names(state="later", to_ms=START_MS + 500) == ["later"]
        assert await names(state="due", priority=200) == ["slow"]
        assert await names(state="due", key="second") == ["second"]
        assert await names(state="later", key="second") == []
        assert await names(state="due", key="gone") == []
        await advance(500)
        assert await names(state="due", priority=10) == ["first", "second", "later"]

    async def test_entries_in_process_are_listed_with_the_token_of_their_claim(self, tester: QueueTester) -> None:
        await self._fill(tester)
        taken = await tester.claim(2)
        browser = _browser(tester)
        found = await browser.browse(tester.ref, EntryFilter(state="processing"))
        assert _names(found) == ["first", "second"]
        assert {each.token for each in found} == {taken[0].held.token}
        again = await browser.browse(tester.ref, EntryFilter(state="processing"), after=found[0].place)
        assert _names(again) == ["second"]
        assert _names(await browser.browse(tester.ref, EntryFilter(state="processing", key="second"))) == ["second"]
        (claim,) = await browser.claims(tester.ref)
        assert (claim.token, claim.entries, claim.started_at) == (taken[0].held.token, 2, START_MS)
        assert claim.lease_until == START_MS + LEASE_MS
        assert await browser.count_up_to(tester.ref, EntryFilter(state="processing"), limit=100) == 2
        assert await browser.count_up_to(tester.ref, EntryFilter(state="processing", key="first"), limit=100) == 1

    async def test_counts_stop_at_their_limit(self, tester: QueueTester) -> None:
        await self._fill(tester)
        browser = _browser(tester)
        assert await browser.count_up_to(tester.ref, EntryFilter(state="due"), limit=100) == 3
        assert await browser.count_up_to(tester.ref, EntryFilter(state="due"), limit=2) == 2
        assert await browser.count_up_to(tester.ref, EntryFilter(state="later", priority=200), limit=100) == 1
        assert await browser.count_up_to(tester.ref, EntryFilter(state="due", key="slow"), limit=100) == 1

    async def test_waiting_entries_are_removed_and_claimed_ones_are_not(self, tester: QueueTester) -> None:
        await self._fill(tester)
        browser = _browser(tester)
        places = [each.place for each in await browser.browse(tester.ref, EntryFilter(state="due"))]
        await tester.claim(1)
        assert await browser.remove(tester.ref, places) == 2
        assert await browser.remove(tester.ref, []) == 0
        assert await browser.count_up_to(tester.ref, EntryFilter(state="due"), limit=9) == 0
        assert _names(await browser.browse(tester.ref, EntryFilter(state="processing"))) == ["first"]

    async def test_dead_letters_are_listed_by_key_and_reason_and_page_by_page(self, tester: QueueTester) -> None:
        browser = _browser(tester)
        for name in ("a", "b", "c"):
            await tester.put(name)
            for _ in range(3):
                await tester.fail(await tester.take())
        found = await browser.letters(tester.ref, LetterFilter())
        assert [each.key for each in found.letters] == ["c", "b", "a"]
        assert found.before is None
        page = await browser.letters(tester.ref, LetterFilter(), limit=2)
        assert [each.key for each in page.letters] == ["c", "b"]
        rest = await browser.letters(tester.ref, LetterFilter(), before=page.before)
        assert [each.key for each in rest.letters] == ["a"]
        assert [each.key for each in (await browser.letters(tester.ref, LetterFilter(key="b"))).letters] == ["b"]
        assert not (await browser.letters(tester.ref, LetterFilter(reason="other"))).letters
        assert await browser.count_letters(tester.ref, limit=2) == 2
        assert await browser.count_letters(tester.ref, limit=9) == 3
        letter = await browser.letter(tester.ref, found.letters[0].id)
        assert letter == found.letters[0]
        assert await browser.letter(tester.ref, 10**12) is None
