"""A trace goes on from the client over HTTP to what reads the events."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tidebook
from tests.integration.server.running import client, served, served_book, served_by_command
from tidebook import Event
from tidebook.server.audit_entry import AUDIT_TOPIC

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PATH = "/v1/journals/orders"


async def test_events_carry_the_trace_of_their_request(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        headers = {"traceparent": CONTEXT}
        own = {"payload": 2, "metadata": {"traceparent": "mine", "by": "me"}}
        await http.post(f"{PATH}/o-1/events", json={"events": [{"payload": 1}, own]}, headers=headers)
        for options in ({}, {"expected": 3}):  # together, and one by one
            append = {"id": "o-1", "events": [{"payload": 3, "metadata": {"by": "me"}}], **options}
            await http.post(PATH, json={"appends": [append]}, headers=headers)
        found = [event.metadata async for event in book.journal("orders").read("o-1")]
        carried = {"traceparent": CONTEXT, "by": "me"}
        assert found == [{"traceparent": CONTEXT}, own["metadata"], carried, carried]


@pytest.mark.parametrize("text", ["", "x", CONTEXT.upper(), CONTEXT + "-1", f"00-{'0' * 32}-00f067aa0ba902b7-01"])
async def test_a_header_that_is_no_context_is_left_out(tmp_path: Path, text: str) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        answer = await http.post(f"{PATH}/o-1/events", json={"events": [{"payload": 1}]}, headers={"traceparent": text})
        assert answer.status_code == 200
        assert [event.metadata async for event in book.journal("orders").read("o-1")] == [None]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans that have ended; `set_tracer_provider` would set the provider for the whole process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """Return the spans of a name, except those of the audit, which is a journal too."""
    found = [span for span in spans.get_finished_spans() if span.name == name]
    return [span for span in found if (span.attributes or {}).get("tidebook.topic") != AUDIT_TOPIC]


def carried(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def chain(spans: InMemorySpanExporter, last: ReadableSpan) -> list[str]:
    """Return the names of a span and of those above it; the last item is the context of a caller elsewhere."""
    by_id = {span.context.span_id: span for span in spans.get_finished_spans() if span.context is not None}
    names, parent = [last.name], last.parent
    while parent is not None and parent.span_id in by_id:
        names.append(by_id[parent.span_id].name)
        parent = by_id[parent.span_id].parent
    return [*names, *([] if parent is None else [f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01"])]


async def test_a_server_continues_the_trace_of_its_caller_to_the_delivery_by_tag(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with (
        tidebook.open(tmp_path, create=True, replicate=True) as book,
        served_book(book) as url,
        client(url) as http,
    ):
        events = [{"payload": 1, "tags": ["paid"]}]
        headers = {"traceparent": CONTEXT}
        assert (await http.post(f"{PATH}/o-1/events", json={"events": events}, headers=headers)).status_code == 200
        entries = {"entries": [{"data": 1}]}
        assert (await http.post("/v1/queues/mail/entries", json=entries, headers=headers)).status_code == 200
        await book.settle()
        async with book.tags.subscribe("paid", "mail", follow=False) as group:
            [event] = [each async for each in group]
        [job] = await book.queue("mail").claim()
    [delivered], [appended], [put] = (named(spans, name) for name in ("tags.deliver", "journal.append", "queue.put"))
    request = "POST /v1/journals/{topic}/{id}/events"
    assert chain(spans, delivered) == ["tags.deliver", "journal.append", request, CONTEXT]
    assert event.metadata == {"traceparent": carried(appended)}
    assert chain(spans, put) == ["queue.put", "POST /v1/queues/{queue}/entries", CONTEXT]
    assert job.traceparent == carried(put)
    assert named(spans, "replicate.slice")  # a separate trace: it is of many appends


async def test_the_spans_of_a_server_are_below_those_of_its_remote_book(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with served(tmp_path / "book") as (url, _), tidebook.open(url) as book:
        with trace.get_tracer("test").start_as_current_span("request"):
            await book.journal("orders").append("o-1", [Event(1)])
            await book.journal("orders").append_many([("o-1", [Event(2)])])
            await book.queue("mail").put(1)
        found = [event.metadata async for event in book.journal("orders").read("o-1")]
    chains = [chain(spans, span) for name in ("journal.append", "queue.put") for span in named(spans, name)]
    batch = f"POST {PATH.replace('orders', '{topic}')}"
    assert ["journal.append", f"{batch}/{{id}}/events", "journal.append", "request"] in chains
    assert ["journal.append", batch, "journal.append_many", "request"] in chains
    assert ["queue.put", "POST /v1/queues/{queue}/entries", "queue.put", "request"] in chains
    [appended] = [
        span for span in named(spans, "journal.append") if chain(spans, span) == ["journal.append", "request"]
    ]
    assert found[0] == {"traceparent": carried(appended)}  # what the remote book gave the event is kept


async def test_a_trace_goes_through_a_server_that_does_not_trace(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    with served_by_command("--book", str(tmp_path / "book")) as (url, _):
        async with tidebook.open(url) as book:
            orders = book.journal("orders")
            with trace.get_tracer("test").start_as_current_span("request"):
                await orders.append("o-1", [Event(1)])
                await orders.append_many([("o-1", [Event(2)])])
            found = [event.metadata async for event in orders.read("o-1")]
    for metadata, name in zip(found, ("journal.append", "journal.append_many"), strict=True):
        [span] = named(spans, name)
        assert chain(spans, span) == [name, "request"]
        assert metadata == {"traceparent": carried(span)}
