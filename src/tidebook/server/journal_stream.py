"""Follow a journal with server-sent events: the stored events, then each new one; a client can resume its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any, NamedTuple
from zlib import crc32

from tidebook.core.errors import InvalidInput, Truncated
from tidebook.core.event import ReadEvent
from tidebook.core.key import Key, journal_id
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.journal.journal import Journal
from tidebook.journal.view import read_events
from tidebook.server.broadcast import Line, StreamPosition
from tidebook.server.responses import Chunk
from tidebook.server.state import ServerState


class PositionedEvent(NamedTuple):
    """An event, and the position of its record."""

    seq_nr: int
    event: ReadEvent
    at: Position


class EventId:
    """The id of a server-sent event, such as `3-1.17-5f1c0a9e-0b6e3c11`.

    It consists of the event's number, the epoch and the offset of its record, and checksums of the journal's key and of
    the topic's id in the log. It therefore shows whether the journal was purged or its topic created again since.
    """

    def __init__(self, seq_nr: int, at: Position, topic: str) -> None:
        self.seq_nr = seq_nr
        self.at = at
        #: The checksum of the topic's id.
        self.topic = topic

    def text(self, key: Key) -> str:
        """Return the id as it is sent."""
        return f"{self.seq_nr}-{self.at.epoch}.{self.at.offset}-{_checksum(str(key))}-{self.topic}"

    @property
    def position(self) -> StreamPosition:
        """The position of the event in the stream, which grows even across a purge and into a new epoch."""
        return (*self.at, self.seq_nr)


def parse_event_id(text: str, key: Key) -> EventId | int:
    """Return the id that a client sends back, or a number alone; raise `InvalidInput` for any other text."""
    if _is_number(text):
        return int(text)
    seq_nr, at, journal, topic = parts if len(parts := text.split("-")) == 4 else ("", "", "", "")
    epoch, _, offset = at.partition(".")
    if not all(map(_is_number, (seq_nr, epoch, offset))):
        raise InvalidInput(f"Last-Event-ID must be the id of an event of this stream, not {text[:40]!r}")
    if journal != _checksum(str(key)):
        raise InvalidInput(f"Last-Event-ID {text[:40]!r} belongs to another journal: omit it to start at the beginning")
    return EventId(int(seq_nr), Position(int(epoch), int(offset)), topic)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 17 and int(text) < LAST


def _checksum(text: str) -> str:
    return f"{crc32(text.encode()):08x}"


async def resume_position(
    state: ServerState, journal: Journal, id: str, last_event_id: str
) -> tuple[int, EventId | None]:
    """Return the number at which a follower resumes, and the id of its last event (None if it sent only a number).

    If the topic was deleted and created again, the follower starts at the beginning, as offsets and numbers do.
    """
    last = parse_event_id(last_event_id, Key(journal.topic, journal_id(id)))
    if isinstance(last, int):
        return last + 1, None
    config = await state.book.store.topic_config(journal.topic)
    # In a later epoch the journals are the same, and their positions are still in order.
    if config is not None and (config.epoch > last.at.epoch or last.topic == _checksum(config.topic_id)):
        return last.seq_nr + 1, last
    return FIRST, None


def follow_journal(
    state: ServerState, journal: Journal, id: str, form: tuple[Any, ...], encode: Callable[[ReadEvent], bytes], *,
    start: int, after: EventId | None,
) -> AsyncGenerator[Chunk, None]:  # fmt: skip
    """Follow a journal from number `start` on or, if `after` is given, after that event.

    All followers with the same `form` share one reader, and an event is encoded once for all of them.
    """
    key = Key(journal.topic, journal_id(id))
    topic = ""

    async def known_topic(events: AsyncIterator[PositionedEvent]) -> AsyncIterator[PositionedEvent]:
        """Yield the events; before the first one, read the id of the topic, which exists by then."""
        nonlocal topic
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if not topic and (config := await state.book.store.topic_config(journal.topic)) is not None:
                    topic = _checksum(config.topic_id)
                yield event

    async def begin() -> AsyncIterator[PositionedEvent]:
        return known_topic(journal.tail_decoded(id, _positioned, start=(await journal.pointer(id) or 0) + 1))

    def line(positioned: PositionedEvent) -> Line:
        sent = EventId(positioned.seq_nr, positioned.at, topic)
        return Line(sent.position, journal.topic, sent.text(key), encode(positioned.event))

    has_reached_start = False

    def wanted(each: Line) -> bool:
        if after is not None:
            return each.position > after.position
        # Events before `start` are left out until the first one is delivered: after a purge numbers start again.
        nonlocal has_reached_start
        has_reached_start = has_reached_start or each.position[-1] >= start
        return has_reached_start

    return state.broadcasts.follow(
        ("journal", *key, *form),
        begin,
        line,
        lambda last: known_topic(_read_after(journal, id, start, last or (None if after is None else after.position))),
        wanted,
    )


def _positioned(rows: Iterable[EventRow], partition: int) -> list[PositionedEvent]:
    rows = list(rows)
    events = zip(rows, read_events(rows, partition), strict=True)
    return [PositionedEvent(row.seq_nr, event, row.position) for row, event in events]


async def _read_after(
    journal: Journal, id: str, start: int, after: StreamPosition | None
) -> AsyncIterator[PositionedEvent]:
    """Read the events after a position: the rest of its incarnation, or all events of a later incarnation."""
    while (head := await journal.head(id)) is not None:
        if after is not None:
            epoch, offset, seq_nr = after
            start = FIRST if head.incarnation > Position(epoch, offset) else seq_nr + 1
        start = max(start, head.delete_to + 1)  # a read cannot start before the deleted events
        try:
            read = journal.read_decoded(id, _positioned, start=start, incarnation=head.incarnation)
            async with aclosing(read) as events:  # type: ignore[type-var]
                async for event in events:
                    after = (*event.at, event.seq_nr)
                    yield event
            return
        except Truncated:
            continue  # deleted or purged during the read: continue with what is left
