"""The log that the pipeline's benchmark replicates: appends of 200-byte events, without waiting for their numbers."""

from __future__ import annotations

import asyncio

from tidebook.core.action import Append
from tidebook.core.errors import TidebookError
from tidebook.core.event import Event, encode_event, pack_events
from tidebook.core.key import partition_of
from tidebook.core.record import encode_record
from tidebook.log.port import Acknowledged, Outgoing
from tidebook.runtime.clock import RandomIds
from tidebook.wiring.book import Book

PAYLOAD = b"x" * 200
IN_FLIGHT_MAX = 20_000


async def fill(
    book: Book, topic: str, *, appends: int, journals: int, events: int = 1, tags: tuple[str, ...] = ()
) -> None:
    """Append to the journals in turn, and return when all records are acknowledged."""
    config = await book.journal(topic).create()
    ids = RandomIds()
    body = pack_events([encode_event(Event(PAYLOAD, tags=tags))] * events)
    tagged = tuple((tag, events) for tag in tags)
    room = asyncio.Semaphore(IN_FLIGHT_MAX)
    failed: list[TidebookError] = []

    def on_sent(sent: Acknowledged | TidebookError) -> None:
        room.release()
        if isinstance(sent, TidebookError):
            failed.append(sent)

    for n in range(appends):
        id = f"j-{n % journals}"
        append = Append(config.epoch, ids.new(), events, body, tagged=tagged)
        value = encode_record(append, limit_bytes=config.limit_bytes)
        await room.acquire()
        book.log.send(Outgoing(topic, partition_of(id, config.partitions), id.encode(), value), on_sent)
    for _ in range(IN_FLIGHT_MAX):
        await room.acquire()
    if failed:
        raise failed[0]
