"""Handlers of tags."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec

from tidebook.api.tags import HorizonAnswer, TaggedEventLine, TagLine, TagRebuildAnswer
from tidebook.core.errors import InvalidInput
from tidebook.server.call import Call, Chunk, Handler, Lines
from tidebook.tags.event import TaggedEvent

CHUNK_EVENTS = 256

_encode = msgspec.json.Encoder().encode


def topics_of(text: str | None) -> list[str] | None:
    """Return the topics of a query parameter, which are separated by commas; None for all."""
    return None if text is None else [each for each in text.split(",") if each]


async def read(call: Call) -> Lines:
    """Read the events of a tag, or follow it; events of topics that the token may not see are left out."""
    query = call.query
    after = query.after
    if query.follow and call.headers.last_event_id is not None:
        after = call.headers.last_event_id
    if query.since is not None and query.after is not None:
        raise InvalidInput("give either after or since, not both")
    events = call.book.tags.read(
        call.parameters[0],
        after=after if after is not None else query.since,
        follow=query.follow,
        topics=topics_of(query.topics),
        consistency=query.consistency,
    )
    return Lines(
        lambda lines: _chunks(lines, call.principal.prefix, events, query.limit), live=query.follow, events=query.follow
    )


async def _chunks(
    lines: Lines, prefix: str, events: AsyncIterator[TaggedEvent], limit: int | None
) -> AsyncGenerator[Chunk, None]:
    chunk: Chunk = []
    count, last = 0, ""
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if prefix and not event.topic.startswith(prefix):
                continue
            if count == limit:
                lines.next = last
                break
            count += 1
            line = TaggedEventLine.of(event)
            last = line.tag_offset
            chunk.append((last, _encode(line)))
            if lines.live or len(chunk) >= CHUNK_EVENTS:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


async def list_tags(call: Call) -> Lines:
    """List the tags."""
    return Lines(lambda _: _tags(call))


async def _tags(call: Call) -> AsyncGenerator[Chunk, None]:
    chunk: Chunk = []
    count = 0
    async with aclosing(call.book.tags.list()) as found:  # type: ignore[type-var]
        async for tag in found:
            if not tag.startswith(call.query.prefix):
                continue
            chunk.append(("", _encode(TagLine(tag))))
            count += 1
            if len(chunk) >= CHUNK_EVENTS:
                yield chunk
                chunk = []
            if count == call.query.limit:
                break
    if chunk:
        yield chunk


async def horizon(call: Call) -> HorizonAnswer:
    """Return the horizon and what holds it back."""
    topics = topics_of(call.query.topics)
    found, status = await call.book.tags.horizon(topics), await call.book.tags.status(topics)
    return HorizonAnswer(
        time_ms=found.time_ms,
        most_ms=found.most_ms,
        age_s=status.age_s,
        topic=status.topic,
        partition=status.partition,
        lag=status.lag,
        remedy=status.remedy,
    )


async def rebuild(call: Call) -> TagRebuildAnswer:
    """Write a tag's rows again."""
    topics = None if call.body is None else call.body.topics
    done = await call.book.tags.rebuild(call.parameters[0], topics=topics)
    return TagRebuildAnswer(done.written, done.removed)


HANDLERS: dict[str, Handler] = {
    "tags.read": read,
    "tags.list": list_tags,
    "tags.horizon": horizon,
    "tags.rebuild": rebuild,
}
