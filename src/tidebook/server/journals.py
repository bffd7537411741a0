"""Handlers of journals, except appends and snapshots."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import msgspec

from tidebook.api.journals import EventLine, IdLine, PointerResponse, ReadQuery
from tidebook.core.errors import NotFound
from tidebook.core.event import ReadEvent
from tidebook.core.key import Key
from tidebook.core.replication_plan import EventRow
from tidebook.journal.journal import Journal
from tidebook.journal.view import read_events
from tidebook.server.call import Call, Handler
from tidebook.server.journal_stream import follow_journal, resume_position
from tidebook.server.masking import Mask
from tidebook.server.responses import CHUNK_BYTES, Chunk, Lines, name_chunks

#: How many events are encoded and sent together; the first chunks are smaller, so that the first byte is sent early.
CHUNK_EVENTS, FIRST_CHUNK_EVENTS = 256, 16

_encoder = msgspec.json.Encoder()
_encode, _encode_lines = _encoder.encode, _encoder.encode_lines


async def ids(call: Call) -> Lines:
    """List the ids of a topic's journals."""
    journal = call.book.journal(call.parameters[0])
    prefix, limit = call.query.prefix, call.query.limit
    return Lines(lambda _: name_chunks(journal.ids(), lambda id: _encode(IdLine(id)), prefix=prefix, limit=limit))


async def pointer(call: Call) -> PointerResponse:
    """Return the last number of a journal."""
    topic, id = call.parameters
    found = await call.book.journal(topic).pointer(id, barrier=call.query.barrier)
    if found is None:
        raise NotFound(f"{Key(topic, id)}: there is no such journal")
    return PointerResponse(found)


async def purge(call: Call) -> None:
    """Remove a journal."""
    topic, id = call.parameters
    await call.book.journal(topic).purge(id)


async def delete(call: Call) -> None:
    """Delete events."""
    topic, id = call.parameters
    await call.book.journal(topic).delete(id, to=call.query.to)


async def read(call: Call) -> Lines:
    """Read events, or follow the journal."""
    topic, id = call.parameters
    query, journal = call.query, call.book.journal(topic)
    if query.follow:
        start, after = query.start, None
        if call.headers.last_event_id is not None:
            start, after = await resume_position(call.state, journal, id, call.headers.last_event_id)
        mask = call.mask(topic)

        def encode(event: ReadEvent) -> bytes:
            return _encode(_event_line(event, mask))

        followed = follow_journal(call.state, journal, id, ("api", mask is None), encode, start=start, after=after)
        return Lines(lambda _: followed, live=True, events=True)
    pages = JournalPages(journal, id, query)
    return Lines(lambda lines: _chunks(lines, pages, query.limit, call.mask(topic), with_ids=call.wants_events))


def _event_line(event: ReadEvent, mask: Mask | None) -> EventLine:
    line = EventLine.of(event)
    return line if mask is None else mask.line(line, event.payload, event.metadata)


class JournalPages:
    """The events of a read, and how many of the current page may be sent together."""

    def __init__(self, journal: Journal, id: str, query: ReadQuery) -> None:
        self.events = journal.read_decoded(id, self._decode, start=query.start, end=query.end, barrier=query.barrier)
        self.chunk_max = CHUNK_EVENTS

    def _decode(self, rows: Iterable[EventRow], partition: int) -> list[ReadEvent]:
        rows = list(rows)
        largest = max([len(row.encoded) for row in rows], default=1)
        self.chunk_max = max(1, min(CHUNK_EVENTS, CHUNK_BYTES // largest))
        return read_events(rows, partition)


async def _chunks(
    lines: Lines, pages: JournalPages, limit: int | None, mask: Mask | None, *, with_ids: bool
) -> AsyncGenerator[Chunk, None]:
    """Yield encoded events in chunks; after `limit` events, set the number that continues the read."""
    chunk: list[ReadEvent | EventLine] = []
    numbers: list[int] = []
    count, early_max = 0, FIRST_CHUNK_EVENTS

    def encode() -> Chunk:
        if with_ids:
            return [(str(number), _encode(each)) for number, each in zip(numbers, chunk, strict=True)]
        return _encode_lines(chunk)

    async with aclosing(pages.events) as events:  # type: ignore[type-var]
        async for event in events:
            if count == limit:
                lines.next = event.seq_nr
                break
            count += 1
            # A plain event is encoded exactly as its `EventLine` would be.
            plain = mask is None and type(event.payload) is not bytes and len(event.tags) < 2
            chunk.append(event if plain else _event_line(event, mask))
            numbers.append(event.seq_nr)
            if len(chunk) >= early_max or len(chunk) >= pages.chunk_max:
                yield encode()
                chunk, numbers = [], []
                early_max = min(2 * early_max, CHUNK_EVENTS)
    if chunk:
        yield encode()


HANDLERS: dict[str, Handler] = {
    "journals.ids": ids,
    "journals.pointer": pointer,
    "journals.purge": purge,
    "journals.delete": delete,
    "journals.read": read,
}
