"""Claims that finish jobs: lost leases among other callers, cancelled callers, and a server that is killed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidebook
from tests.integration.server.running import client, served, served_by_command
from tidebook.core.errors import LeaseLost
from tidebook.queue.port import QueueSettings
from tidebook.queue.sqlite.store import SqliteQueues

CLAIMS = "/v1/queues/mail/claims"


async def claim(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post(CLAIMS, json={"together": False, **body})


async def test_a_lost_lease_among_many_callers_is_the_error_of_one(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
        await queue.put_many(list(range(80)))
        held = [(await claim(http)).json()["jobs"][0] for _ in range(40)]
        lost = [each["lease"] for each in held[::4]]
        assert (await http.post("/v1/queues/mail/done", json={"leases": lost})).status_code == 204
        answers = await asyncio.gather(*(claim(http, done=[each["lease"]]) for each in held))
        assert [each.status_code for each in answers] == [409, 200, 200, 200] * 10
        claimed = [job for each in answers if each.status_code == 200 for job in each.json()["jobs"]]
        assert sorted(job["data"] for job in claimed) == list(range(40, 70))
        rest = await queue.claim(100)
        # What a refused caller would have got was never claimed: it has no timeout, and is no dead letter.
        assert [(job.data, job.timeouts) for job in rest] == [(number, 0) for number in range(70, 80)]
        assert await queue.dead_letters() == []


async def test_a_lease_that_two_callers_finish_is_finished_by_one(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.queue("mail").put_many([1, 2, 3])
        [job] = (await claim(http)).json()["jobs"]
        answers = await asyncio.gather(*(claim(http, done=[job["lease"]]) for _ in range(8)))
        assert sorted(each.status_code for each in answers) == [200] + [409] * 7
        assert (await book.queue("mail").status()).processing == 1


async def test_a_caller_that_is_cancelled_gives_back_its_claim_and_its_job_stays_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tidebook.open(tmp_path / "book", create=True) as book:
        queue = await book.queue("mail").open()
        await queue.put_many([1, 2, 3, 4])
        [first], [second] = await queue.claim(1), await queue.claim(1)
        finish_and_claim = SqliteQueues.finish_and_claim

        async def cancel_first(*arguments: Any, **options: Any) -> Any:
            result = await finish_and_claim(*arguments, **options)
            cancelled.cancel()
            return result

        monkeypatch.setattr(SqliteQueues, "finish_and_claim", cancel_first)
        cancelled, other = (asyncio.create_task(queue.claim(finished=each)) for each in (first, second))
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        [claimed] = await other
        assert claimed.data == 4
        await asyncio.gather(*queue._releasing)
        [given_back] = await queue.claim(10)
        assert (given_back.data, given_back.timeouts) == (3, 1)
        for each in (first, second):
            with pytest.raises(LeaseLost):
                await queue.done(each)


async def test_a_remote_book_finishes_jobs_with_its_claim(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, local), tidebook.open(url) as book:
        await local.queue("mail").put_many([1, 2])
        queue = book.queue("mail")
        [one] = await queue.claim()
        [two] = await queue.claim(finished=one)
        assert (one.data, two.data) == (1, 2)
        with pytest.raises(LeaseLost):
            await queue.claim(finished=[one])
        assert await queue.claim(finished=[two]) == []
        assert (await local.queue("mail").status()).processing == 0


async def test_a_killed_server_has_finished_what_it_answered(tmp_path: Path) -> None:
    folder, count = tmp_path / "book", 2_000
    async with tidebook.open(folder, create=True) as book:
        await book.queue("mail").put_many(list(range(count)))
    answered: set[int] = set()
    asked: set[int] = set()
    enough = asyncio.Event()
    with served_by_command("--book", str(folder)) as (url, process):

        async def work() -> None:
            done: list[dict[str, Any]] = []
            async with client(url) as http:
                while True:
                    asked.update(each["data"] for each in done)
                    jobs = (await claim(http, done=[each["lease"] for each in done])).json()["jobs"]
                    answered.update(each["data"] for each in done)
                    done = jobs
                    if len(answered) > 100:
                        enough.set()

        working = [asyncio.create_task(work()) for _ in range(16)]
        await asyncio.wait_for(enough.wait(), 60)
        process.kill()
        for each in working:
            with contextlib.suppress(httpx.TransportError):
                await each
    async with tidebook.open(folder) as book:
        entries = {each.data for each in await book.queue("mail").entries(count)}
        finished = set(range(count)) - entries
        assert answered <= finished <= asked
