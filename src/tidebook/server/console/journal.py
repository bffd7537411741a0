"""One journal: its head, a page of its events, searches by number, offset, time or filter, and its live view."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from tidebook.api.routes import BY_NAME
from tidebook.core.errors import InvalidInput
from tidebook.core.event import ReadEvent
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.seq_nr import LAST
from tidebook.journal.journal import Journal
from tidebook.server.console import payload_view
from tidebook.server.console.event_filter import Expression, FilterFields, matches, parse
from tidebook.server.console.formatting import parse_time
from tidebook.server.console.live import LiveView, RenderRow
from tidebook.server.console.page import Page
from tidebook.server.console.timeline import Timeline, read_timeline
from tidebook.server.console.view import View
from tidebook.server.journal_stream import EventId, follow_journal, resume_position
from tidebook.server.masking import Mask
from tidebook.server.responses import Chunk

EVENTS_MAX: Final = 50
#: How many events one request may examine for a filter, and for how long; the next one continues.
SCAN_EVENTS_MAX: Final = 20_000
SCAN_S_MAX: Final = 0.25
#: After this many matches a filter continues only on request.
MATCHES_MAX: Final = 200
TAGS_SHOWN_MAX: Final = 50
#: How many of the last events a live view begins with.
LIVE_EVENTS: Final = 10

Number = Annotated[int, Meta(ge=1, le=LAST)]


class JournalQuery(msgspec.Struct, frozen=True):
    """A journal, and which of its events to show: from a number, an offset or a time on, or those that match."""

    topic: str
    id: str
    at: Number | None = None
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    time: str | None = None
    where: str = ""
    #: How many events matched in earlier steps of the same search.
    found: Annotated[int, Meta(ge=0)] = 0
    live: bool = False
    unmask: bool = False


class EventRowView(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the list."""

    number: int
    timestamp_ms: int
    type: str | None
    version: int
    tags: list[str]
    summary: str
    partition: int
    offset: int


class HeadView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the journal."""

    last: int
    deleted_to: int
    incarnation: str
    position: str
    expires_at_ms: int | None
    touched_ms: int
    tags: dict[str, int]
    tags_left_out: int
    snapshots: list[int]


class ScanProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a filter through the events."""

    scanned: int
    #: The number up to which everything was examined, and the last number of the journal.
    to: int
    last: int
    done: bool
    #: Whether the page continues the search by itself.
    continues: bool
    #: The number at which to continue, and how many matched so far.
    next: int | None
    found: int


class JournalData(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    id: str
    head: HeadView | None
    timeline: Timeline | None
    events: list[EventRowView]
    previous: int | None
    next: int | None
    scan: ScanProgress | None
    masked: bool


async def journal(view: View) -> JournalData:
    query = view.fields
    found = view.book.journal(query.topic)
    head = await found.head(query.id, barrier="offset")
    mask = view.mask(query.topic)
    events, scan, previous, more, timeline = list[ReadEvent](), None, None, False, None
    if head is not None and not query.live:
        timeline = await read_timeline(view.book.store, Key(query.topic, query.id), head)
        if query.where.strip():
            expression = parse(query.where)
            events, scan = await scan_events(found, query.id, head, query, expression, mask)
        else:
            start = await _start(found, query, head)
            events, more = await read_page(found, query.id, start, head, EVENTS_MAX)
            previous = await page_before(found, query.id, start, head)
    return JournalData(
        topic=query.topic,
        id=query.id,
        head=None if head is None else await _head_view(found, query.id, head),
        timeline=timeline,
        events=[row_of(event, mask) for event in events],
        previous=previous,
        next=events[-1].seq_nr + 1 if more else None,
        scan=scan,
        masked=view.is_masked(query.topic),
    )


def row_of(event: ReadEvent, mask: Mask | None) -> EventRowView:
    """Return an event as the list shows it."""
    payload = event.payload if mask is None else mask(event.payload)
    return EventRowView(
        number=event.seq_nr,
        timestamp_ms=event.timestamp_ms,
        type=event.type,
        version=event.version,
        tags=sorted(event.tags),
        summary=payload_view.summary(payload),
        partition=event.partition,
        offset=event.offset,
    )


async def _head_view(journal: Journal, id: str, head: Head) -> HeadView:
    tags = sorted(head.tag_counts.items(), key=lambda each: -each[1])
    return HeadView(
        last=head.seq_nr,
        deleted_to=head.delete_to,
        incarnation=f"{head.incarnation.epoch}/{head.incarnation.offset}",
        position=f"{head.position.epoch}/{head.position.offset}",
        expires_at_ms=head.expires_at_ms,
        touched_ms=head.touched_ms,
        tags=dict(tags[:TAGS_SHOWN_MAX]),
        tags_left_out=max(0, len(tags) - TAGS_SHOWN_MAX),
        snapshots=[each.seq_nr for each in await journal.snapshots(id, head)],
    )


async def read_page(journal: Journal, id: str, start: int, head: Head, limit: int) -> tuple[list[ReadEvent], bool]:
    """Return events from a number on, and whether there are more; skipped numbers are not searched one by one."""
    events: list[ReadEvent] = []
    for low, high in ((start, start + limit - 1), (start + limit, LAST)):
        if low > head.seq_nr:
            break
        async with aclosing(_read(journal, id, low, min(high, LAST))) as found:
            async for event in found:
                if len(events) == limit:
                    return events, True
                events.append(event)
        if len(events) == limit:
            break
    return events, bool(events) and events[-1].seq_nr < head.seq_nr


def _read(journal: Journal, id: str, start: int, end: int) -> Any:
    return journal.read(id, start=start, end=end, barrier="offset")


async def _start(journal: Journal, query: JournalQuery, head: Head) -> int:
    """Return the first number to show; without a place, that of the last page, or of the journal for a filter."""
    if sum(each is not None for each in (query.at, query.offset, query.time)) > 1:
        raise InvalidInput("seek by a number, an offset or a time, not by several of them")
    if query.at is not None:
        return query.at
    if query.offset is not None:
        offset = query.offset
        return await seek(journal, query.id, head, lambda event: event.offset >= offset)
    if query.time is not None:
        time_ms = parse_time(query.time)
        return await seek(journal, query.id, head, lambda event: event.timestamp_ms >= time_ms)
    if query.where.strip():
        return head.delete_to + 1
    return await page_before(journal, query.id, head.seq_nr + 1, head) or 1


async def page_before(journal: Journal, id: str, end: int, head: Head) -> int | None:
    """Return the first number of the page that ends before `end`; None if there is no event before `end`.

    Numbers may be skipped, so events are counted to find the start.
    """
    first, width = head.delete_to + 1, EVENTS_MAX
    low = high = max(first, end - width)
    count = await _count_up_to_page(journal, id, high, end)
    found = count
    while found < EVENTS_MAX and low > first:  # numbers were skipped: search further back, then bisect
        width *= 2
        low = max(first, end - width)
        found = await _count_up_to_page(journal, id, low, end)
        if found <= EVENTS_MAX:
            high, count = low, found
    while low < high:
        middle = (low + high) // 2
        found = await _count_up_to_page(journal, id, middle, end)
        if found > EVENTS_MAX:
            low = middle + 1
        else:
            high, count = middle, found
    return high if count else None


async def _count_up_to_page(journal: Journal, id: str, start: int, end: int) -> int:
    """Return how many events there are from `start` on and before `end`; at most one more than a page has."""
    count = 0
    if start < end:
        async with aclosing(_read(journal, id, start, min(end - 1, LAST))) as events:
            async for _ in events:
                count += 1
                if count > EVENTS_MAX:
                    break
    return count


async def seek(journal: Journal, id: str, head: Head, reached: Callable[[ReadEvent], bool]) -> int:
    """Return the number of the first event with `reached(event)`, by bisection; without one, the last number plus 1."""
    low, high = head.delete_to + 1, head.seq_nr + 1
    while low < high:
        middle = (low + high) // 2
        event = await first_event(journal, id, middle, head)
        if event is None or reached(event):
            high = middle
        else:
            low = event.seq_nr + 1
    return low


async def first_event(journal: Journal, id: str, start: int, head: Head) -> ReadEvent | None:
    """Return the first event at or after a number."""
    events, _ = await read_page(journal, id, start, head, 1)
    return events[0] if events else None


async def last_number_before(journal: Journal, id: str, number: int, head: Head) -> int | None:
    """Return the number of the event before a number; numbers between them may be skipped."""
    found, low, high = None, head.delete_to, number - 1
    middle = high  # most numbers are not skipped, so try the one directly before first
    while low < high:
        event = await first_event(journal, id, middle, head)
        if event is not None and event.seq_nr < number:
            found = low = event.seq_nr
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return found


async def scan_events(
    journal: Journal, id: str, head: Head, query: JournalQuery, expression: Expression, mask: Mask | None
) -> tuple[list[ReadEvent], ScanProgress]:
    """Return the next events that match, within the budget of one request."""
    start = await _start(journal, query, head)
    ends_s = math.inf  # the clock starts with the first event, so that every request examines some
    matched, scanned, last, done = list[ReadEvent](), 0, start - 1, True
    async with aclosing(_read(journal, id, min(start, LAST), LAST)) as events:
        async for event in events:
            if len(matched) >= EVENTS_MAX or scanned >= SCAN_EVENTS_MAX or time.monotonic() > ends_s:
                done = False
                break
            if not scanned:
                ends_s = time.monotonic() + SCAN_S_MAX
            scanned, last = scanned + 1, event.seq_nr
            if matches(expression, fields_of(event, mask)):
                matched.append(event)
    found = query.found + len(matched)
    progress = ScanProgress(
        scanned=scanned,
        to=last,
        last=head.seq_nr,
        done=done,
        continues=not done and found < MATCHES_MAX,
        next=None if done else last + 1,
        found=found,
    )
    return matched, progress


def fields_of(event: ReadEvent, mask: Mask | None) -> FilterFields:
    """Return the values of an event that a filter compares; masked fields are masked here too."""
    return FilterFields(
        number=event.seq_nr,
        offset=event.offset,
        time_ms=event.timestamp_ms,
        type=event.type,
        version=event.version,
        tags=event.tags,
        payload=event.payload if mask is None else mask(event.payload),
        meta=event.metadata if mask is None or event.metadata is None else mask(event.metadata),
    )


# ---- live


async def follow(view: View, render: RenderRow) -> AsyncGenerator[Chunk, None]:
    """Follow a journal: its last events, then each new one; a browser that reconnects continues after its last row."""
    query, journal, mask = view.fields, view.book.journal(view.fields.topic), view.mask(view.fields.topic)
    head = await journal.head(query.id, barrier="offset")
    start = 1 if head is None else max(head.delete_to + 1, head.seq_nr - LIVE_EVENTS + 1)
    after: EventId | None = None
    if view.last_event_id is not None:
        start, after = await resume_position(view.state, journal, query.id, view.last_event_id)

    def encode(event: ReadEvent) -> bytes:
        return render(row_of(event, mask))

    form = ("console", query.unmask)  # a row links to its event with the same parameter
    return follow_journal(view.state, journal, query.id, form, encode, start=start, after=after)


PAGES = (Page("journal", BY_NAME["journals.read"], journal, JournalQuery),)
LIVES = (
    LiveView(
        name="journal.live",
        path="/journal/live",
        route=BY_NAME["journals.read"],
        follow=follow,
        template="event_row.html",
        query=JournalQuery,
    ),
)
