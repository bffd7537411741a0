"""Claims and puts are bounded in bytes, not only in entries."""

from __future__ import annotations

import asyncio

import pytest

import tidebook
from tidebook.core.errors import TooLarge
from tidebook.queue import Entry

pytestmark = pytest.mark.postgres
MEGABYTE = 1_000_000


async def test_a_claim_stops_at_64_megabytes_and_the_next_one_returns_the_rest(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    entries = [Entry(data=bytes([place]) * MEGABYTE, priority=place // 40, key=f"{place}") for place in range(70)]
    put = await queue.put_many(entries)
    assert put.inserted == 70
    first = await queue.claim(500)
    assert [job.data for job in first] == [entry.data for entry in entries[:64]]
    await queue.done(first)
    assert [job.data for job in await queue.claim(500)] == [entry.data for entry in entries[64:]]


async def test_concurrent_claims_return_all_due_entries_however_large(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    for _ in range(5):
        await queue.put_many([b"x" * MEGABYTE] * 16)
    taken = await asyncio.gather(*(queue.claim(35) for _ in range(3)))
    assert all(taken), "a claim was empty although entries were due"
    assert len({job.id for jobs in taken for job in jobs}) == 80


async def test_one_large_entry_among_small_ones_of_several_priorities_is_claimed_in_order(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    small = [
        Entry(data=f"{number}", priority=number // 100, key="k" if number == 150 else None) for number in range(300)
    ]
    large = Entry(data="x" * 900_000, priority=1)
    entries = [*small[:170], large, *small[170:]]
    await queue.put_many(entries)
    jobs = await queue.claim(1_000)
    assert [job.data for job in jobs] == [entry.data for entry in entries]
    await queue.done(jobs)
    assert (await queue.status()).processing == 0
    assert await queue.claim(1_000) == []


async def test_a_put_once_that_does_not_fit_one_transaction_is_refused(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    with pytest.raises(TooLarge):
        await queue.put_once([b"x" * MEGABYTE] * 17, source="s", steps=[])
    assert (await queue.status()).waiting == 0


async def test_one_claim_returns_thousands_of_small_entries(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put_many(list(range(2_500)))
    assert [job.data for job in await queue.claim(2_400)] == list(range(2_400))
    assert [job.data for job in await queue.claim(2_400)] == list(range(2_400, 2_500))


async def test_a_put_of_no_entries_does_nothing(book: tidebook.Book) -> None:
    assert (await book.queue("mail").put_many([])).inserted == 0
