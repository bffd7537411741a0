"""A trace goes on from the client over HTTP to what reads the events."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tidebook
from tests.integration.server.running import client, served, served_by_command
from tidebook import Event

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


async def test_a_trace_goes_through_a_server_that_does_not_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with served_by_command("--book", str(tmp_path / "book")) as (url, _):
        async with tidebook.open(url) as book:
            orders = book.journal("orders")
            with provider.get_tracer("test").start_as_current_span("request") as request:
                await orders.append("o-1", [Event(1)])
                await orders.append_many([("o-1", [Event(2)])])
            found = [event.metadata async for event in orders.read("o-1")]
    spans = {span.name: span for span in exporter.get_finished_spans()}
    for metadata, name in zip(found, ("journal.append", "journal.append_many"), strict=True):
        context, parent = spans[name].get_span_context(), spans[name].parent
        assert context is not None
        assert parent is not None
        assert parent.span_id == request.get_span_context().span_id
        carried = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        assert metadata == {"traceparent": carried}
