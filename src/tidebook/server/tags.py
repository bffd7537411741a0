"""Handlers of tags."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import datetime

import msgspec

from tidebook.api.tags import HorizonResponse, TaggedEventLine, TagLine, TagRebuildResponse
from tidebook.core.errors import InvalidInput
from tidebook.server.broadcast import Line, StreamPosition
from tidebook.server.call import Call, Handler, topics_of
from tidebook.server.responses import Chunk, ChunkBuffer, Lines, name_chunks
from tidebook.tags.event import TaggedEvent, encode_offset, position_before

CHUNK_EVENTS = 256

_encode = msgspec.json.Encoder().encode


async def read(call: Call) -> Lines:
    """Read the events of a tag, or follow it; events of topics that the token may not see are left out."""
    query = call.query
    if query.since is not None and query.after is not None:
        raise InvalidInput("give either after or since, not both")
    after: str | datetime | None = query.after if query.after is not None else query.since
    if call.headers.last_event_id is not None:
        after = call.headers.last_event_id
    topics, tag = topics_of(query.topics), call.parameters[0]
    if query.follow and query.consistency != "delay":
        call.book.tags.read(tag, after=after, topics=topics)  # checks the arguments
        return Lines(lambda _: _follow(call, tag, after, topics), live=True, events=True)
    events = call.book.tags.read(tag, after=after, follow=query.follow, topics=topics, consistency=query.consistency)
    return Lines(lambda lines: _chunks(call, lines, events, query.limit), live=query.follow, events=query.follow)


def _follow(
    call: Call, tag: str, after: str | datetime | None, topics: list[str] | None
) -> AsyncGenerator[Chunk, None]:
    """Follow a tag with one reader for all followers, who see the same order because of the horizon."""
    tags, unmask, prefix = call.book.tags, call.unmask, call.principal.prefix

    async def begin() -> AsyncIterator[TaggedEvent]:
        now = position_before(tag, (await tags.horizon(topics)).time_ms)
        return tags.read(tag, after=encode_offset(now) if now.time_ms >= 0 else None, follow=True, topics=topics)

    def line(event: TaggedEvent) -> Line:
        encoded = _encode(_event_line(call, event))
        at = event.row
        position = (at.time_ms, at.topic, at.partition, at.offset, at.index)
        return Line(position, event.topic, event.tag_offset, encoded)

    def catch_up(last: StreamPosition | None) -> AsyncIterator[TaggedEvent]:
        # All events of the last event's time are read again; those already delivered are skipped by their position.
        resume = after if last is None else encode_offset(position_before(tag, last[0]))
        return tags.read(tag, after=resume, topics=topics)

    key = ("tag", tag, None if topics is None else tuple(sorted(topics)), unmask)
    return call.state.broadcasts.follow(key, begin, line, catch_up, lambda each: each.topic.startswith(prefix))


def _event_line(call: Call, event: TaggedEvent) -> TaggedEventLine:
    line = TaggedEventLine.of(event)
    mask = call.mask(event.topic)
    return line if mask is None else mask.line(line, event.payload, event.metadata)


async def _chunks(
    call: Call, lines: Lines, events: AsyncIterator[TaggedEvent], limit: int | None
) -> AsyncGenerator[Chunk, None]:
    prefix, buffer = call.principal.prefix, ChunkBuffer(1 if lines.live else CHUNK_EVENTS)
    count, last = 0, ""
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if prefix and not event.topic.startswith(prefix):
                continue
            if count == limit:
                lines.next = last
                break
            count += 1
            line = _event_line(call, event)
            last = line.tag_offset
            if buffer.add(last, _encode(line)):
                yield buffer.take()
    if buffer:
        yield buffer.take()


async def list_tags(call: Call) -> Lines:
    """List the tags."""
    tags, prefix, limit = call.book.tags.list(), call.query.prefix, call.query.limit
    return Lines(lambda _: name_chunks(tags, lambda tag: _encode(TagLine(tag)), prefix=prefix, limit=limit))


async def horizon(call: Call) -> HorizonResponse:
    """Return the horizon, and the partition that holds it back."""
    topics = topics_of(call.query.topics)
    found, status = await call.book.tags.horizon(topics), await call.book.tags.status(topics)
    return HorizonResponse(
        time_ms=found.time_ms,
        most_ms=found.most_ms,
        age_s=status.age_s,
        topic=status.topic,
        partition=status.partition,
        lag=status.lag,
        remedy=status.remedy,
    )


async def rebuild(call: Call) -> TagRebuildResponse:
    """Rewrite a tag's rows."""
    topics = None if call.body is None else call.body.topics
    done = await call.book.tags.rebuild(call.parameters[0], topics=topics)
    return TagRebuildResponse(done.written, done.removed)


HANDLERS: dict[str, Handler] = {
    "tags.read": read,
    "tags.list": list_tags,
    "tags.horizon": horizon,
    "tags.rebuild": rebuild,
}
