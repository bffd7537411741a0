"""Traces continue from an append to its readers, and from a publish to its relay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import tidebook
from tidebook import Event
from tidebook.runtime import tracing


class Tracing:
    """A tracer, and the spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [each for each in self._exporter.get_finished_spans() if each.name == name]

    def span(self, name: str) -> Any:
        [found] = self.spans(name)
        return found


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Tracing:
    """Set a tracer provider for one test: `set_tracer_provider` would set it for the whole process."""
    found = Tracing()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", found.provider)
    return found


def carried(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


async def test_a_reader_continues_the_trace_of_the_append(tmp_path: Path, traced: Tracing) -> None:
    async with tidebook.open(tmp_path, create=True) as book:
        orders = book.journal("orders")
        with traced.tracer.start_as_current_span("request") as request:
            await orders.append("o-1", [Event({"n": 1}, metadata={"by": "me"}, tags={"paid"}, type="Paid", version=2)])
        [event] = [each async for each in orders.read("o-1")]
    appended = traced.span("journal.append")
    assert appended.parent.span_id == request.get_span_context().span_id
    assert (event.payload, set(event.tags), event.type, event.version) == ({"n": 1}, {"paid"}, "Paid", 2)
    assert event.metadata is not None
    assert event.metadata["by"] == "me"
    context = trace.get_current_span(TraceContextTextMapPropagator().extract(event.metadata)).get_span_context()
    assert context.trace_id == request.get_span_context().trace_id
    assert context.span_id == appended.get_span_context().span_id


async def test_append_many_carries_the_context_and_keeps_an_existing_one(tmp_path: Path, traced: Tracing) -> None:
    async with tidebook.open(tmp_path, create=True) as book:
        orders = book.journal("orders")
        own = {tracing.KEY: "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
        await orders.append_many([("o-1", [Event(1)]), ("o-2", [Event(2, metadata=own)])])
        [first] = [each async for each in orders.read("o-1")]
        [second] = [each async for each in orders.read("o-2")]
    assert first.metadata == {tracing.KEY: carried(traced.span("journal.append_many"))}
    assert second.metadata == own


async def test_replication_and_delivery_by_tag_are_spans(tmp_path: Path, traced: Tracing) -> None:
    async with tidebook.open(tmp_path, create=True, replicate=True) as book:
        await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
        await book.settle()
        async with book.tags.subscribe("paid", "mail", follow=False) as group:
            [event] = [each async for each in group]
    assert event.payload == 1
    assert sum(each.attributes["tidebook.records"] for each in traced.spans("replicate.slice")) >= 1  # type: ignore[index, misc]
    appended, delivered = traced.span("journal.append"), traced.span("tags.deliver")
    assert delivered.context.trace_id == appended.context.trace_id
    assert delivered.parent.span_id == appended.context.span_id


async def test_the_span_of_a_failed_append_has_the_type_of_its_error_and_not_its_text(
    tmp_path: Path, traced: Tracing
) -> None:
    async with tidebook.open(tmp_path, create=True) as book:
        with pytest.raises(tidebook.InvalidInput):
            await book.journal("orders").append("o-1", [])
    failed = traced.span("journal.append")
    assert failed.attributes == {"tidebook.topic": "orders", "error.type": "InvalidInput"}
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert not failed.events


async def test_a_message_carries_the_context_and_the_relay_links_to_it(tmp_path: Path, traced: Tracing) -> None:
    async with tidebook.open(tmp_path, create=True) as book:
        engine = create_async_engine(book.outbox.url.replace("sqlite:", "sqlite+aiosqlite:"))
        async with AsyncSession(engine) as session, session.begin():
            await book.outbox.publish(session, topic="shop", payload=b"1", headers={"kind": b"paid"})
        await engine.dispose()
        assert await book.outbox.relay(once=True) == 1
        [message] = [each async for each in book.log_topic("shop").read()]
    published = traced.span("outbox.publish")
    assert dict(message.headers)["traceparent"] == carried(published).encode()
    [link] = traced.span("outbox.relay").links
    assert link.context.span_id == published.context.span_id


@pytest.mark.parametrize("text", [b"\xff", "00-0-0-0", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 55, 7, None])
def test_an_invalid_context_is_left_out(traced: Tracing, text: object) -> None:
    span = tracing.begin("outbox.relay", carried=[text])
    assert span is not None
    span.end()
    assert not traced.span("outbox.relay").links


async def test_nothing_is_carried_by_an_unsampled_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(sampler=ALWAYS_OFF))
    async with tidebook.open(tmp_path, create=True) as book:
        await book.journal("orders").append("o-1", [Event(1)])
        [event] = [each async for each in book.journal("orders").read("o-1")]
    assert event.metadata is None


async def test_nothing_is_traced_without_a_provider(tmp_path: Path) -> None:
    assert not tracing.is_on()
    assert tracing.begin("x") is None
    async with tidebook.open(tmp_path, create=True) as book:
        await book.journal("orders").append("o-1", [Event(1)])
        [event] = [each async for each in book.journal("orders").read("o-1")]
    assert event.metadata is None
