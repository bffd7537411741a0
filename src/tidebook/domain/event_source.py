"""The streams that projections follow: the events of tags or of whole topics, in the order of their log time.

A position is a tuple that starts with the log time; positions of one source are compared as tuples, so `(time_ms,)` is
before every event of that time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol

import msgspec

from tidebook.core.errors import Corrupt
from tidebook.core.key import Key, partition_of
from tidebook.core.replication_plan import EventRow, TagPosition, TagRow, TopicPosition, TopicRow
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import Horizons

PAGE_ROWS: Final = 1_000
#: How long a stream waits before it polls for new events.
POLL_S: Final = 0.5

#: A position in a stream. The first element is a time; an empty tuple is the beginning.
At = tuple[Any, ...]
BEGINNING: Final[At] = ()


class SourcePosition(msgspec.Struct, frozen=True, array_like=True):
    """A position in a stream, with the offsets of the log that some sources need to continue after it."""

    at: At = BEGINNING
    #: The offsets of the log by topic and partition, if the source reads the log.
    log: dict[str, Any] = {}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(SourcePosition).decode


def encode_position(position: SourcePosition) -> str:
    """Encode a position as a string; equal positions have equal strings."""
    return _encode(position).decode()


def decode_position(text: str) -> SourcePosition:
    """Undo `encode_position`; raise Corrupt for any other string."""
    try:
        return _decode(text)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the position of a projection is damaged: {error}") from error


class SourceRow(msgspec.Struct, frozen=True, gc=False):
    """An event of a stream, with its journal."""

    at: At
    topic: str
    id: str
    partition: int
    row: EventRow


class SourcePage(msgspec.Struct, frozen=True, gc=False):
    """Consecutive events of a stream, and the position after which the stream continues."""

    rows: Sequence[SourceRow]
    position: SourcePosition
    #: Whether a scan of the store begins or ends at this position. A scan does not deliver events in the order of the
    #: stream, so the position is stored even if there are no rows, and the stream is then read from there.
    jumps: bool = False


class EventSource(Protocol):
    """A stream of events that can be continued after any of its positions."""

    topics: frozenset[str] | None
    #: The tags that it follows; empty for whole topics.
    tags: frozenset[str]

    def pages(self, after: SourcePosition) -> AsyncIterator[SourcePage]:
        """Yield the events below the horizon, then a page without rows at the horizon."""
        ...

    async def place(self, key: Key, partition: int, row: EventRow) -> At:
        """Return the position that a replicated event has in this stream, or would have if it were in it."""
        ...


def describe_source(source: EventSource) -> str:
    """Return a description of the events that a source selects; a projection compares it with the stored one."""
    followed = {"tags": sorted(source.tags), "topics": None if source.topics is None else sorted(source.topics)}
    return _encode({name: value for name, value in followed.items() if value}).decode()


def slice_of(topic: str, id: str, slices: int) -> int:
    """Return the slice that a journal belongs to."""
    return int.from_bytes(blake2b(f"{topic}\0{id}".encode(), digest_size=4).digest()) % slices


class TagSource:
    """The events with at least one of several tags, each once."""

    def __init__(self, store: StoreWriter, horizons: Horizons, tags: Sequence[str], topics: frozenset[str] | None):
        self.topics = topics
        self._store = store
        self._horizons = horizons
        self._tags = tuple(tags)
        self.tags = frozenset(tags)

    async def pages(self, after: SourcePosition) -> AsyncIterator[SourcePage]:
        horizon = await self._horizons.read(self.topics)

        def request(tag: str, at: At) -> Any:
            position = TagPosition(tag, *at) if len(at) > 1 else None
            from_ms = at[0] if at else 0
            return self._store.tag_rows(tag, after=position, from_ms=from_ms, until_ms=horizon.time_ms, limit=PAGE_ROWS)

        async for rows in merged_pages(dict.fromkeys(self._tags, after.at), request, _tag_place):
            found = [
                SourceRow(at, row.topic, row.id, row.partition, row.event)
                for at, row in rows
                if self.topics is None or row.topic in self.topics
            ]
            yield SourcePage(found, SourcePosition(rows[-1][0]))
        if not after.at or horizon.time_ms > after.at[0]:
            yield SourcePage((), SourcePosition((horizon.time_ms,)))

    async def place(self, key: Key, partition: int, row: EventRow) -> At:
        return (row.time_ms, key.topic, partition, row.position.offset, row.index, row.position.epoch)


def _tag_place(_: str, row: TagRow) -> At:
    return (row.time_ms, row.topic, row.partition, row.offset, row.index, row.epoch)


class TopicSource:
    """All events of topics, from a store that orders them."""

    def __init__(self, store: StoreWriter, horizons: Horizons, topics: frozenset[str]):
        self.topics: frozenset[str] | None = topics
        self.tags = frozenset[str]()
        self._names = sorted(topics)
        self._store = store
        self._horizons = horizons
        self._partitions: dict[str, int] = {}

    async def pages(self, after: SourcePosition) -> AsyncIterator[SourcePage]:
        horizon = await self._horizons.read(self.topics)
        await self._read_partitions()

        def request(topic: str, at: At) -> Any:
            return self._store.topic_rows(
                topic, after=_topic_position(topic, at), until_ms=horizon.time_ms, limit=PAGE_ROWS
            )

        async for rows in merged_pages(dict.fromkeys(self._names, after.at), request, _topic_place):
            found = [
                SourceRow(at, at[1], row.id, partition_of(row.id, self._partitions[at[1]]), row.event)
                for at, row in rows
            ]
            yield SourcePage(found, SourcePosition(rows[-1][0]))
        if not after.at or horizon.time_ms > after.at[0]:
            yield SourcePage((), SourcePosition((horizon.time_ms,)))

    async def _read_partitions(self) -> None:
        for topic in self._names:
            if topic not in self._partitions and (config := await self._store.topic_config(topic)) is not None:
                self._partitions[topic] = config.partitions

    async def place(self, key: Key, partition: int, row: EventRow) -> At:
        return (row.time_ms, key.topic, row.position.epoch, row.position.offset, key.id, row.seq_nr)


def _topic_place(topic: str, row: TopicRow) -> At:
    return (row.time_ms, topic, row.epoch, row.offset, row.id, row.seq_nr)


def _topic_position(topic: str, at: At) -> TopicPosition | None:
    """Return the position in one topic after which its events come after `at` in the merged stream."""
    if not at:
        return None
    if len(at) == 1 or at[1] < topic:  # the events of this topic at that time come after it
        return TopicPosition(at[0], -1, -1, "", -1)
    if at[1] > topic:  # they were already delivered
        return TopicPosition(at[0] + 1, -1, -1, "", -1)
    return TopicPosition(at[0], *at[2:])


async def merged_pages(
    starts: Mapping[str, At], request: Callable[[str, At], Any], place: Callable[[str, Any], At]
) -> AsyncIterator[list[tuple[At, Any]]]:
    """Merge ordered streams into pages in the order of `place`; rows with the same position are merged into one.

    Each stream is read a page at a time; a merged page ends where the first of the read pages ends.
    """
    after, ended = dict(starts), set[str]()
    waiting: dict[str, list[tuple[At, Any]]] = {name: [] for name in starts}
    while True:
        for name, rows in waiting.items():
            if not rows and name not in ended:
                rows += [(place(name, row), row) for row in await request(name, after[name])]
                if rows:
                    after[name] = rows[-1][0]
                else:
                    ended.add(name)
        filled = [rows for rows in waiting.values() if rows]
        if not filled:
            return
        last = min(rows[-1][0] for rows in filled)
        page: dict[At, Any] = {}
        for name, rows in waiting.items():
            count = bisect_right(rows, last, key=_first)
            page.update(rows[:count])
            waiting[name] = rows[count:]
        yield sorted(page.items(), key=_first) if len(filled) > 1 else list(page.items())


def _first(item: tuple[At, Any]) -> At:
    return item[0]
