"""A trace continues from the put of an entry to its handler and its end, also in another process."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from opentelemetry import trace

import tidebook
from tests.integration.journal.test_tracing import Tracing, carried
from tests.integration.journal.test_tracing import traced as traced
from tests.integration.server.running import served
from tidebook.queue import Entry, Job, QueueSettings, Retry, Worker

pytestmark = pytest.mark.postgres
OWN = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


async def test_a_handler_continues_the_trace_of_the_put(book: tidebook.Book, traced: Tracing) -> None:
    queue = book.queue("mail")

    async def handle(job: Job) -> None:
        with traced.tracer.start_as_current_span("send"):
            pass

    with traced.tracer.start_as_current_span("request") as request:
        await queue.put({"to": "x"}, key="x")
    await Worker(queue, handle).run(once=True)
    put, claimed, processed, done = map(traced.span, ("queue.put", "queue.claim", "queue.process", "queue.done"))
    assert put.parent.span_id == request.get_span_context().span_id
    assert [link.context.span_id for link in claimed.links] == [put.context.span_id]
    assert processed.parent.span_id == done.parent.span_id == put.context.span_id
    assert processed.context.trace_id == put.context.trace_id
    assert traced.span("send").parent.span_id == processed.context.span_id
    assert processed.attributes == {"tidebook.queue": "mail", "tidebook.attempt": 1}


async def test_a_blocking_handler_sees_the_span_in_its_thread(book: tidebook.Book, traced: Tracing) -> None:
    queue, seen = book.queue("mail"), list[int]()
    await queue.put(1)
    await Worker(queue, lambda job: seen.append(trace.get_current_span().get_span_context().span_id)).run(once=True)
    assert seen == [traced.span("queue.process").context.span_id]


async def test_the_context_survives_bundles_failures_and_dead_letters(book: tidebook.Book, traced: Tracing) -> None:
    queue = book.queue("mail", settings=QueueSettings(max_timeouts=1))
    await queue.put_many([1, Entry(data=2, traceparent=OWN)])
    expected = {1: carried(traced.span("queue.put")), 2: OWN}
    jobs = await queue.claim(100)  # stored together on PostgreSQL
    assert {job.data: job.traceparent for job in jobs} == expected
    await queue.fail(jobs[0])
    await queue.fail(jobs[1])
    assert {job.data: job.traceparent for job in await queue.claim(2, together=False)} == expected


async def test_a_retried_dead_letter_continues_its_trace(book: tidebook.Book, traced: Tracing) -> None:
    queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
    await queue.put(1, key="k")
    await queue.fail(await queue.claim())
    [letter] = await queue.dead_letters()
    await queue.retry(letter.id)
    [job] = await queue.claim()
    assert job.traceparent == carried(traced.span("queue.put"))


async def test_a_merged_entry_carries_the_trace_of_the_newest_put(book: tidebook.Book, traced: Tracing) -> None:
    queue = book.queue("mail")
    await queue.put(1, key="k")
    await queue.put(2, key="k")
    [job] = await queue.claim()
    assert job.traceparent == carried(traced.spans("queue.put")[-1])


async def test_a_failed_handler_is_marked_and_the_next_attempt_has_the_same_trace(
    book: tidebook.Book, traced: Tracing
) -> None:
    queue = book.queue("mail")
    tried: list[int] = []

    async def handle(job: Job) -> None:
        tried.append(job.timeouts)
        if len(tried) == 1:
            raise ValueError("the secret text of an error")

    await queue.put(1)
    await Worker(queue, handle, retry=Retry(first_s=0.0, spread=0.0)).run(once=True)
    first, second = traced.spans("queue.process")
    assert first.status.status_code is trace.StatusCode.ERROR
    assert first.attributes is not None
    assert first.attributes["error.type"] == "ValueError"
    assert not first.events
    assert second.context is not None
    assert first.context is not None
    assert second.context.trace_id == first.context.trace_id == traced.span("queue.put").context.trace_id
    assert traced.span("queue.fail").context.trace_id == first.context.trace_id


async def test_a_put_over_http_carries_the_context_of_its_header_or_its_entry(tmp_path: Path) -> None:
    other = OWN.replace("a", "c")
    async with served(tmp_path) as (url, _), httpx.AsyncClient(base_url=url) as http:
        body = {"entries": [{"data": 1}, {"data": 2, "traceparent": other}]}
        answer = await http.post("/v1/queues/mail/entries", json=body, headers={"traceparent": OWN})
        assert answer.status_code == 200, answer.text
        await http.post("/v1/queues/mail/entries", json={"entries": [{"data": 3}]}, headers={"traceparent": "x"})
        bad = {"entries": [{"data": 4, "traceparent": "x"}]}
        assert (await http.post("/v1/queues/mail/entries", json=bad)).status_code == 400
        jobs = (await http.post("/v1/queues/mail/claims", json={"limit": 9})).json()["jobs"]
    assert {job["data"]: job.get("traceparent") for job in jobs} == {1: OWN, 2: other, 3: None}


async def test_a_remote_worker_continues_the_trace_of_a_remote_put(tmp_path: Path, traced: Tracing) -> None:
    async with served(tmp_path) as (url, _), tidebook.open(url) as remote:
        queue, seen = remote.queue("mail"), list[object]()
        with traced.tracer.start_as_current_span("request") as request:
            await queue.put("x")
        await Worker(queue, lambda job: seen.append(job.data)).run(once=True)
    assert seen == ["x"]
    assert traced.span("queue.process").context.trace_id == request.get_span_context().trace_id


async def test_nothing_is_carried_without_a_provider(book: tidebook.Book) -> None:
    queue = book.queue("mail")
    await queue.put(1)
    [job] = await queue.claim()
    assert job.traceparent is None


@pytest.mark.parametrize("text", ["x", "00-" + "0" * 32 + "-" + "b" * 16 + "-01", OWN + "\n", OWN.upper()])
async def test_an_invalid_context_is_refused(book: tidebook.Book, text: str) -> None:
    with pytest.raises(tidebook.InvalidInput, match="traceparent"):
        await book.queue("mail").put_many([Entry(data=1, traceparent=text)])
