"""Follow a journal with server-sent events: the stored events, then each new one; a client can resume its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from zlib import crc32

from tidebook.core.errors import InvalidInput, Truncated
from tidebook.core.event import ReadEvent
from tidebook.core.key import Key, journal_id
from tidebook.core.seq_nr import FIRST
from tidebook.journal.journal import Journal
from tidebook.journal.view import read_events
from tidebook.server.broadcast import Line, StreamPosition
from tidebook.server.responses import Chunk
from tidebook.server.state import ServerState


async def resume_position(
    state: ServerState, journal: Journal, id: str, start: int, after: StreamPosition | None
) -> tuple[int, StreamPosition | None]:
    """Return where a follower resumes: at the beginning if its topic was deleted, because offsets then start again."""
    if after is None:
        return start, None
    head = await journal.head(id)
    if head is None:
        topic_was_deleted = await state.book.store.topic_config(journal.topic) is None
    else:
        topic_was_deleted = head.position.offset < after[0]
    return (FIRST, None) if topic_was_deleted else (start, after)


def follow_journal(
    state: ServerState, journal: Journal, id: str, form: tuple[Any, ...], encode: Callable[[ReadEvent], bytes], *,
    start: int, after: StreamPosition | None,
) -> AsyncGenerator[Chunk, None]:  # fmt: skip
    """Follow a journal from sequence number `start`, or from the event after the position `after`.

    All followers with the same `form` share one reader, and each event that `encode` has encoded.
    """
    key = Key(journal.topic, journal_id(id))

    async def begin() -> AsyncIterator[ReadEvent]:
        return journal.tail(id, start=(await journal.pointer(id) or 0) + 1)

    def line(event: ReadEvent) -> Line:
        # All records of a journal are in one partition, so offsets also grow across a purge.
        return Line((event.offset, event.seq_nr), journal.topic, _event_id(event, key), encode(event))

    has_reached_start = False

    def wanted(each: Line) -> bool:
        if after is not None:
            return each.position > after
        # Skip the events before `start`, but none after it: after a purge, smaller numbers come again.
        nonlocal has_reached_start
        has_reached_start = has_reached_start or each.position[1] >= start
        return has_reached_start

    return state.broadcasts.follow(
        ("journal", *key, *form),
        begin,
        line,
        lambda last: _read_after(journal, id, start, last or after),
        wanted,
    )


async def _read_after(journal: Journal, id: str, start: int, after: StreamPosition | None) -> AsyncIterator[ReadEvent]:
    """Read the events after a position: the rest of its incarnation, or all of a later one, numbered from 1 again."""
    while (head := await journal.head(id)) is not None:
        if after is not None:
            start = FIRST if head.incarnation.offset > after[0] else after[1] + 1
        start = max(start, head.delete_to + 1)  # a read of one incarnation refuses to begin before the deleted events
        try:
            read = journal.read_decoded(id, read_events, start=start, incarnation=head.incarnation)
            async with aclosing(read) as events:  # type: ignore[type-var]
                async for event in events:
                    after = (event.offset, event.seq_nr)
                    yield event
            return
        except Truncated:
            continue  # deleted or purged during the read: continue with what is left


def _event_id(event: ReadEvent, key: Key) -> str:
    """Return the id of a server-sent event: its number, its offset and a checksum of the journal's key."""
    return f"{event.seq_nr}-{event.offset}-{_checksum(key)}"


def parse_event_id(text: str, key: Key) -> tuple[int, StreamPosition | None]:
    """Return the number after that of a Last-Event-ID, and its position; None for an id that is only a number."""
    seq_nr, *more = text.split("-")
    numbers = [seq_nr, *more[:1]]
    if len(more) not in (0, 2) or not all(each.isascii() and each.isdecimal() and len(each) < 17 for each in numbers):
        raise InvalidInput(f"Last-Event-ID must be the id of an event of this stream, not {text[:40]!r}")
    if not more:
        return int(seq_nr) + 1, None
    if more[1] != _checksum(key):
        raise InvalidInput(f"Last-Event-ID {text[:40]!r} belongs to another journal: omit it to start at the beginning")
    return int(seq_nr) + 1, (int(more[0]), int(seq_nr))


def _checksum(key: Key) -> str:
    return f"{crc32(f'{key.topic}/{key.id}'.encode()):08x}"
