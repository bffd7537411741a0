"""Invalid input raises InvalidInput or NotFound on either backend, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tidebook.core.errors import InvalidInput, LeaseLost, NotFound
from tidebook.queue import Entry, QueueSettings
from tidebook.queue.port import Step
from tidebook.queue.queue import Queue

pytestmark = pytest.mark.postgres
NAN = float("nan")

WRONG: dict[str, Callable[[Queue], Awaitable[Any]]] = {
    "a set as data": lambda q: q.put({1}),
    "an object as data": lambda q: q.put(object()),
    "text that is none": lambda q: q.put("\ud800"),
    "too much": lambda q: q.put("x" * 1_000_001),
    "a true priority": lambda q: q.put(1, priority=True),
    "a priority below 0": lambda q: q.put(1, priority=-1),
    "a priority above 255": lambda q: q.put(1, priority=256),
    "a key that is a number": lambda q: q.put(1, key=3),  # type: ignore[arg-type]
    "a key with NUL": lambda q: q.put(1, key="a\0"),
    "an empty key": lambda q: q.put(1, key=""),
    "a long key": lambda q: q.put(1, key="é" * 501),
    "a date that is text": lambda q: q.put(1, process_at="now"),  # type: ignore[arg-type]
    "a date without a zone": lambda q: q.put(1, process_at=datetime(2030, 1, 1)),
    "an expiry without a zone": lambda q: q.put(1, expires_at=datetime(2030, 1, 1)),
    "a date before all": lambda q: q.put(1, process_at=datetime.min),
    "a date after all": lambda q: q.put(1, expires_at=10**18),
    "text for a list": lambda q: q.put_many("abc"),
    "an entry for a list": lambda q: q.put_many(Entry(data=1)),  # type: ignore[arg-type]
    "nothing for a list": lambda q: q.put_many(None),  # type: ignore[arg-type]
    "one of many": lambda q: q.put_many([1, 2, {3}]),
    "a claim of none": lambda q: q.claim(0),
    "a claim of too many": lambda q: q.claim(10_001),
    "a claim of a fraction": lambda q: q.claim(1.5),  # type: ignore[arg-type]
    "no lease": lambda q: q.claim(lease=0),
    "a lease that is no number": lambda q: q.claim(lease=NAN),
    "a lease for ever": lambda q: q.claim(lease=timedelta.max),
    "a lease of 8,000 years": lambda q: q.claim(lease=8_000 * 365 * 86_400),
    "too much for a letter": lambda q: q.edit(1, "x" * 1_000_001),
    "no job": lambda q: q.done([]),
    "None for a job": lambda q: q.done(None),  # type: ignore[arg-type]
    "a number for a job": lambda q: q.done(5),  # type: ignore[arg-type]
    "text for a job": lambda q: q.fail("x"),  # type: ignore[arg-type]
    "a limit below 0": lambda q: q.entries(-1),
    "text for a limit": lambda q: q.dead_letters("x"),  # type: ignore[arg-type]
    "a source that is a number": lambda q: q.marks(3),  # type: ignore[arg-type]
    "a source with NUL": lambda q: q.put_once([1], source="a\0", steps=[]),
    "a source that is no text": lambda q: q.put_once([1], source="\ud800", steps=[]),
    "a long source": lambda q: q.put_once([1], source="x" * 1_001, steps=[]),
    "no steps": lambda q: q.put_once([1], source="s", steps=None),  # type: ignore[arg-type]
    "a step that is none": lambda q: q.put_once([1], source="s", steps=[(1, None, "a")]),  # type: ignore[list-item]
    "a part that is text": lambda q: q.put_once([1], source="s", steps=[Step("x", None, "a")]),  # type: ignore[arg-type]
    "a part that is too large": lambda q: q.put_once([1], source="s", steps=[Step(2**31, None, "a")]),
    "a step to nowhere": lambda q: q.put_once([1], source="s", steps=[Step(1, None, None)]),  # type: ignore[arg-type]
    "a step from a number": lambda q: q.put_once([1], source="s", steps=[Step(1, 3, "a")]),  # type: ignore[arg-type]
    "two steps of a part": lambda q: q.put_once([1], source="s", steps=[Step(1, None, "a"), Step(1, "a", "b")]),
}


@pytest.mark.parametrize("what", WRONG)
async def test_invalid_calls_are_refused(book: tidebook.Book, what: str) -> None:
    queue = book.queue("mail")
    with pytest.raises(InvalidInput):
        await WRONG[what](queue)
    assert (await queue.status()).waiting == 0


@pytest.mark.parametrize("limit", [-1, 2**64, "x", None, 1.5, True])
async def test_the_limit_of_dead_letters_of_all_queues_is_checked(book: tidebook.Book, limit: Any) -> None:
    with pytest.raises(InvalidInput, match="limit"):
        await book.queues.dead_letters(limit)


@pytest.mark.parametrize("name", ["", "a b", "x" * 201, "é", 3, None])
def test_a_queues_name_is_checked(tmp_path: Path, name: Any) -> None:
    with tidebook.open_sync(tmp_path) as book, pytest.raises(InvalidInput, match="queue"):
        book.queue(name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_timeouts": -1},
        {"max_timeouts": 256},
        {"lease_ms": 0},
        {"lease_ms": "x"},
        {"finished_max": 0},
        {"period": "week"},
        {"drained": "burn"},
        {"synchronous": "off"},
        {"parallel_keys": 1},
    ],
)
async def test_settings_are_checked_before_they_are_stored(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        QueueSettings(**wrong)
    (name, value), *_ = wrong.items()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    (tmp_path / "tidebook.toml").write_text(f"[queue.mail]\n{name} = {text}\n")
    async with tidebook.open(tmp_path / "tidebook.toml") as book:
        with pytest.raises(InvalidInput, match=r"queue\.mail"):
            await book.queue("mail").put(1)


@pytest.mark.parametrize("letter", [1, -5, 2**70, "x", None])
async def test_a_dead_letter_that_is_not_there_is_not_found(book: tidebook.Book, letter: Any) -> None:
    queue = book.queue("mail")
    for call in (queue.retry(letter), queue.drop(letter), queue.edit(letter, 1)):
        with pytest.raises(NotFound):
            await call


async def test_a_delay_is_a_hundred_years_at_most(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put(1)
    jobs = await queue.claim()
    with pytest.raises(InvalidInput, match="delay"):
        await queue.fail(jobs, delay=timedelta(days=8_000 * 365))
    assert await queue.fail(jobs, delay=timedelta(days=99 * 365)) == ["waiting"]
    assert (await queue.status()).later == 1


async def test_a_reason_may_hold_anything(book: tidebook.Book) -> None:
    queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
    await queue.put(1)
    await queue.fail(await queue.claim(), reason="a\0b\ud800" + "x" * 5_000)
    (letter,) = await queue.dead_letters()
    assert letter.reason.startswith("ab?xxx")
    assert len(letter.reason) <= 1_000


async def test_of_two_jobs_of_a_key_in_one_call_only_the_current_holder_is_extended_and_finished(
    book: tidebook.Book,
) -> None:
    queue = book.queue("mail")
    await queue.put_many([Entry(data=1, key="k"), Entry(data=2, key="m"), 3])
    old = await queue.claim(5, lease=0.02)
    await asyncio.sleep(0.1)
    new = await queue.claim(5, lease=1)
    until = [job.lease_until for job in new]
    with pytest.raises(LeaseLost):
        await queue.heartbeat([*old, *new], lease=60)
    assert all(job.lease_until > before for job, before in zip(new, until, strict=True))
    with pytest.raises(LeaseLost):
        await queue.done([*old, *new])
    assert await queue.entries() == []


async def test_a_job_that_is_named_twice_is_done_once(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put_many([1, 2])
    first, second = await queue.claim(2)
    await queue.done([first, second, first])
    with pytest.raises(LeaseLost, match="finished"):
        await queue.done(first)


async def test_a_job_that_is_named_twice_does_not_count_for_another(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put_many([1, 2])
    first, second = await queue.claim(20)
    await queue.heartbeat([first, first])
    await queue.done([first, first])
    assert [entry.data for entry in await queue.entries()] == [second.data]
    await queue.done(second)


async def test_a_closed_book_ends_its_listeners_and_accepts_nothing(where: Path) -> None:
    async def receive(queue: Queue) -> str:
        async for _ in queue.listen():
            pass
        return "the end"

    async with tidebook.open(where) as book:
        queue = await book.queue("mail").open()
        listening = asyncio.create_task(receive(queue))
        await asyncio.sleep(0.05)
    assert await asyncio.wait_for(listening, 30) == "the end"
    with pytest.raises(InvalidInput, match="closed"):
        await queue.put(1)
    with pytest.raises(InvalidInput, match="closed"):
        await queue.claim()


async def test_a_book_closes_while_its_timer_has_a_dead_letter_to_report(tmp_path: Path) -> None:
    for number in range(20):
        async with asyncio.timeout(60):
            async with tidebook.open(tmp_path) as book:
                queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
                await queue.put(number)
                await queue.fail(await queue.claim())


def test_the_blocking_book_has_the_same_queue_methods(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        book.queue("mail").put_many([1, 2])
        assert book.queues.names() == ["mail"]
        assert [status.due for status in book.queues.status()] == [2]
        assert book.queues.dead_letters() == []
        assert book.feed("paid", "mail").run(follow=False) == 0
        assert next(iter(book.queue("mail").listen())) is not None


@pytest.mark.parametrize("limit", [1, 100])
async def test_entries_of_a_cancelled_claim_are_returned(book: tidebook.Book, limit: int) -> None:
    queue = await book.queue("mail").open()
    await queue.put("x")
    store = await book.queues._runtime.store()
    begun, going_on, claim = asyncio.Event(), asyncio.Event(), store.claim

    async def slowly(*arguments: Any, **named: Any) -> Any:
        begun.set()
        await going_on.wait()
        return await claim(*arguments, **named)

    store.claim = slowly  # type: ignore[method-assign]
    claiming = asyncio.create_task(queue.claim(limit))
    await begun.wait()
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    going_on.set()
    store.claim = claim  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        while not (jobs := await queue.claim()):  # noqa: ASYNC110  there is no event to await
            await asyncio.sleep(0.01)
    assert (jobs[0].data, jobs[0].timeouts) == ("x", 1)


@pytest.mark.parametrize("limit", [1, 100])
async def test_entries_of_a_claim_that_is_cancelled_as_it_ends_are_returned(book: tidebook.Book, limit: int) -> None:
    queue = await book.queue("mail").open()
    await queue.put("x")
    claim = queue._claim

    def cancelled_at_its_end(call: Any) -> Any:
        ending = claim(call)
        ending.add_done_callback(lambda _: claiming.cancel())
        return ending

    queue._claim = cancelled_at_its_end  # type: ignore[assignment]
    claiming = asyncio.create_task(queue.claim(limit))
    with pytest.raises(asyncio.CancelledError):
        await claiming
    queue._claim = claim
    async with asyncio.timeout(30):
        while not (jobs := await queue.claim()):  # noqa: ASYNC110  there is no event to await
            await asyncio.sleep(0.01)
    assert (jobs[0].data, jobs[0].timeouts) == ("x", 1)


@pytest.mark.parametrize("limit", [1, 100])
async def test_only_one_of_concurrent_calls_finishes_a_job(book: tidebook.Book, limit: int) -> None:
    queue = book.queue("mail")
    await queue.put_many(["x", "y"])
    jobs = await queue.claim(limit)
    ended = await asyncio.gather(*(queue.done(jobs) for _ in range(5)), return_exceptions=True)
    assert [type(each) for each in ended if each is not None] == [tidebook.LeaseLost] * 4
