"""Create OpenTelemetry spans in programs that have set a tracer provider; do nothing in others.

This package never imports the API: a program that traces has imported it. The trace context is carried as `traceparent`
of W3C Trace Context, in the metadata of events, the headers of messages, and a column of queue entries.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from tidebook.core.event import Event

#: The key of the trace context in an event's metadata and a message's headers.
KEY: Final = "traceparent"
#: How many traces a span of a batch links to.
LINKS_MAX: Final = 128
_API: Final = "opentelemetry.trace"
_CONTEXT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_on() -> bool:
    """Return whether the program has set a tracer provider."""
    api: Any = sys.modules.get(_API)
    return api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


class TraceSpan:
    """A span that the caller ends; it is not the current one, so that it may be open across an `await`."""

    __slots__ = ("_span", "carried")

    def __init__(self, span: Any) -> None:
        self._span = span
        #: The trace context as text; None if the span is not recorded.
        self.carried = _format(span.get_span_context()) if span.is_recording() else None

    def end(self, error: object = None) -> None:
        """End the span; an error, or a failed outcome, marks it by its type, because a message may hold a payload."""
        if error is not None:
            api: Any = sys.modules[_API]
            self._span.set_attribute("error.type", type(error).__qualname__)
            self._span.set_status(api.StatusCode.ERROR)
        self._span.end()


def begin(
    name: str,
    *,
    carried: Iterable[object] = (),
    parent: object = None,
    start_ns: int | None = None,
    **attributes: str | int,
) -> TraceSpan | None:
    """Begin a span below the current one, or below `parent`, a trace context.

    Return None if the program does not trace. It links to the trace contexts that `carried` holds, as text or bytes;
    values that are not a trace context are left out.
    """
    if not is_on():
        return None
    api: Any = sys.modules[_API]
    links: list[Any] = []
    for each in carried:
        if len(links) == LINKS_MAX:
            break
        if (context := _parse(each)) is not None:
            links.append(api.Link(context))
    named = {f"tidebook.{key}": value for key, value in attributes.items()}
    continued = _parse(parent)
    context = None if continued is None else api.set_span_in_context(api.NonRecordingSpan(continued))
    tracer = api.get_tracer("tidebook")
    return TraceSpan(tracer.start_span(name, context=context, links=links, attributes=named, start_time=start_ns))


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[TraceSpan | None]:
    """Trace the block as a span; see `begin`."""
    begun = begin(name, **attributes)
    try:
        yield begun
    except BaseException as error:
        if begun is not None:
            begun.end(error)
        raise
    if begun is not None:
        begun.end()


@contextmanager
def continuing(name: str, parent: object, **attributes: Any) -> Iterator[TraceSpan | None]:
    """Trace the block as a span below `parent`, a trace context, and make it the current span within the block."""
    begun = begin(name, parent=parent, **attributes)
    if begun is None:
        yield None
        return
    api: Any = sys.modules[_API]
    with api.use_span(begun._span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        try:
            yield begun
        except BaseException as error:
            begun.end(error)
            raise
        begun.end()


def valid_context(carried: object) -> str | None:
    """Return the value if it is a valid trace context, else None; this needs no tracer."""
    return carried if isinstance(carried, str) and _CONTEXT.fullmatch(carried) else None


def delivered(name: str, metadata: Mapping[str, Any] | None, **attributes: Any) -> None:
    """Record the delivery of an event as a span of the trace that its metadata carries, if it carries one."""
    parent = None if metadata is None else metadata.get(KEY)
    if _parse(parent) is not None and (begun := begin(name, parent=parent, **attributes)) is not None:
        begun.end()


def with_context(events: Sequence[Event[Any]], begun: TraceSpan | None) -> Sequence[Event[Any]]:
    """Return a list of events with a span's trace context in the metadata of each event that has none there.

    Other sequences are returned unchanged.
    """
    if begun is None or begun.carried is None or type(events) is not list:
        return events
    return [_with_context(event, begun.carried) for event in events]


def _with_context(event: Event[Any], carried: str) -> Event[Any]:
    if type(event) is not Event or not (event.metadata is None or isinstance(event.metadata, Mapping)):
        return event  # encoding it will raise InvalidInput
    metadata = {KEY: carried, **(event.metadata or {})}
    return Event(event.payload, tags=event.tags, metadata=metadata, type=event.type, version=event.version)


def _format(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _parse(carried: object) -> Any:
    """Return the span context of a `traceparent`; None if it is malformed, because any client may have written it."""
    api: Any = sys.modules.get(_API)
    if isinstance(carried, bytes):
        carried = carried.decode("ascii", "replace")
    if api is None or not isinstance(carried, str):
        return None
    parts = carried.split("-")
    if [len(part) for part in parts[:4]] != [2, 32, 16, 2]:
        return None
    try:
        trace_id, span_id, flags = (int(part, 16) for part in parts[1:4])
    except ValueError:
        return None
    context = api.SpanContext(trace_id, span_id, is_remote=True, trace_flags=api.TraceFlags(flags))
    return context if context.is_valid else None
