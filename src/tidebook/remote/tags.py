"""Streams by tag on a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import msgspec

from tidebook.api.tags import TaggedEventLine, TagLine, TagRebuildBody
from tidebook.core.buckets import Buckets
from tidebook.core.errors import InvalidInput
from tidebook.core.event import Event, encode_event
from tidebook.core.replication_plan import TagRow
from tidebook.remote.connection import Connection
from tidebook.tags.event import TaggedEvent, check_tag, check_topics, decode_offset, start_position
from tidebook.tags.horizon import Horizon, HorizonStatus, OnWaiting
from tidebook.tags.rebuild import Rebuilt
from tidebook.tags.settings import Consistency
from tidebook.tags.subscription import Subscription
from tidebook.tags.tags import Tags

_decode_lines = msgspec.json.Decoder(TaggedEventLine).decode_lines
_decode_line = msgspec.json.Decoder(TaggedEventLine).decode
_decode_tags = msgspec.json.Decoder(TagLine).decode_lines


class RemoteTags(Tags):
    """Streams by tag over all topics of a server's book. `Tags` documents the methods."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(
        self,
        tag: str,
        *,
        after: str | datetime | None = None,
        follow: bool = False,
        topics: Iterable[str] | None = None,
        consistency: Consistency | None = None,
        on_waiting: OnWaiting | None = None,
    ) -> AsyncIterator[TaggedEvent]:
        """Yield the events of a tag after `after`; with `follow`, continue live, even across restarts of the server.

        See `Tags.read`. `on_waiting` is not called: the server logs what its streams wait for.
        """
        check_tag(tag)
        start_position(tag, after, 0)
        if consistency not in (None, "horizon", "delay"):
            raise InvalidInput(f'consistency must be "horizon" or "delay", not {consistency!r}')
        wanted = check_topics(topics)
        query: dict[str, object] = {
            "since": after if isinstance(after, datetime) else None,
            "topics": _names(wanted),
            "consistency": consistency,
        }
        offset = after if isinstance(after, str) else None
        if wanted is not None and not wanted:
            return _no_events()
        return self._follow(tag, query, offset) if follow else self._read(tag, {**query, "after": offset})

    async def _read(self, tag: str, query: dict[str, object]) -> AsyncIterator[TaggedEvent]:
        async with aclosing(self._connection.lines("tags.read", tag, query=query)) as pages:
            async for page in pages:
                for line in _decode_lines(page):
                    yield _tagged_event(tag, line)

    async def _follow(self, tag: str, query: dict[str, object], after: str | None) -> AsyncIterator[TaggedEvent]:
        async with aclosing(
            self._connection.events("tags.read", tag, query={**query, "follow": True}, after=after)
        ) as events:
            async for event in events:
                if event is not None:
                    yield _tagged_event(tag, _decode_line(event.data))

    def subscribe(self, tag: str, group: str, **options: Any) -> Subscription:
        """Raise `InvalidInput`: the members of a group share the store."""
        raise InvalidInput(
            "a remote book has no groups: use read(follow=True), or open the folder or .toml of the book"
        )

    async def set_bucket_size(self, size: str) -> Buckets:
        """Raise `InvalidInput`: setting the bucket size needs direct access to the store."""
        raise InvalidInput("a remote book does not change bucket sizes: open the folder or .toml of the book")

    async def buckets(self) -> Buckets:
        """Raise `InvalidInput`: reading the bucket sizes needs direct access to the store."""
        raise InvalidInput("a remote book does not read bucket sizes: open the folder or .toml of the book")

    async def rebuild(self, tag: str, *, topics: Iterable[str] | None = None) -> Rebuilt:
        check_tag(tag)
        wanted = check_topics(topics)
        body = TagRebuildBody(None if wanted is None else tuple(sorted(wanted)))
        response = await self._connection.call("tags.rebuild", tag, body=body)
        return Rebuilt(tag, written=response.written, removed=response.removed)

    async def horizon(self, topics: Iterable[str] | None = None) -> Horizon:
        response = await self._horizon(topics)
        return Horizon(response.time_ms, response.most_ms, response.topic, response.partition)

    async def status(self, topics: Iterable[str] | None = None) -> HorizonStatus:
        response = await self._horizon(topics)
        return HorizonStatus(
            horizon=None if response.time_ms < 0 else datetime.fromtimestamp(response.time_ms / 1000, UTC),
            age_s=response.age_s,
            topic=response.topic,
            partition=response.partition,
            lag=response.lag,
            remedy=response.remedy,
        )

    async def _horizon(self, topics: Iterable[str] | None) -> Any:
        return await self._connection.call("tags.horizon", query={"topics": _names(check_topics(topics))})

    async def list(self) -> AsyncIterator[str]:
        async with aclosing(self._connection.lines("tags.list")) as pages:
            async for page in pages:
                for line in _decode_tags(page):
                    yield line.tag


def _names(topics: frozenset[str] | None) -> str | None:
    return None if topics is None else ",".join(sorted(topics))


async def _no_events() -> AsyncIterator[TaggedEvent]:
    return
    yield


def _tagged_event(tag: str, line: TaggedEventLine) -> TaggedEvent:
    """Return the event of a line as the stream of a store returns it, except for its incarnation, which is not sent."""
    place = decode_offset(tag, line.tag_offset)
    payload = line.payload if line.payload_base64 is msgspec.UNSET else line.payload_base64
    event = Event(payload, tags=line.tags, metadata=line.metadata, type=line.type, version=line.version)
    row = TagRow(
        tag, place.time_ms, line.topic, line.partition, line.offset, place.index, place.epoch, line.id,
        place.epoch, 0, line.tag_seq_nr, line.seq_nr, line.timestamp_ms, encode_event(event),
    )  # fmt: skip
    return TaggedEvent(row)
