"""Histories that the pipeline's tests write, and the rows of a store for comparison."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tidebook.core.event import Event
from tidebook.core.key import Key, partition_of
from tidebook.core.record import MAGIC
from tidebook.core.replication import EventRow
from tidebook.log.port import Outgoing, read_all
from tidebook.pipeline.slice import replicate_slice
from tidebook.store.port import StoreWriter
from tidebook.wiring.book import Book

TOPIC = "orders"


async def write_history(book: Book, *, topic: str = TOPIC, ids: int = 20, steps: int = 300, seed: int = 1) -> None:
    """Appends of all kinds, deletes and purges, in a seeded order."""
    draw = random.Random(seed)
    journal = book.journal(topic)
    for step in range(steps):
        id = f"o-{draw.randrange(ids)}"
        kind = draw.random()
        if kind < 0.85:
            tags = {"paid"} if draw.random() < 0.2 else ()
            events = [Event({"step": step, "i": i}, tags=tags) for i in range(draw.choice([1, 1, 1, 3]))]
            await journal.append(id, events)
        elif kind < 0.95:
            await journal.delete(id, to=draw.randint(1, 10))
        else:
            await journal.purge(id)


async def write_garbage(book: Book, id: str = "o-1", *, topic: str = TOPIC, value: bytes = b"garbage") -> int:
    """A record that nobody can read; returns its offset."""
    facts = await book.journal(topic).facts()
    partition = partition_of(id, facts.partitions)
    return (await book.log.append(Outgoing(topic, partition, id.encode(), value))).offset


def newer_record() -> bytes:
    """A whole record of a version that is not known yet."""
    from zlib import crc32

    rest = b"from the future"
    return bytes([MAGIC, 99]) + crc32(rest, crc32(bytes([99]))).to_bytes(4, "big") + rest


async def rows_of(store: StoreWriter, topics: tuple[str, ...] = (TOPIC,)) -> dict[str, Any]:
    """All that replication writes, in a form that compares: pointers, heads with graves, events, parked records."""
    found: dict[str, Any] = {}
    for topic in topics:
        facts = await store.facts(topic)
        assert facts is not None
        pointers = [await store.pointer(topic, number) for number in range(facts.partitions)]
        events: dict[str, list[EventRow]] = {}
        heads = {}
        async for id in store.ids(topic):
            head = await store.head(Key(topic, id))
            assert head is not None
            heads[id] = head
            events[id] = list(await store.events(Key(topic, id), head, after=0, to=head.seq_nr, limit=100_000))
        found[topic] = {
            "pointers": pointers,
            "heads": heads,
            "events": events,
            "parked": [each async for each in store.parked(topic)],
        }
    return found


async def expected_rows(book: Book, fresh: Book, topics: tuple[str, ...] = (TOPIC,)) -> Mapping[str, Any]:
    """The rows as one pass over the log in this process makes them, in another book's store."""
    for topic in topics:
        facts = await book.store.facts(topic)
        assert facts is not None
        await fresh.store.set_facts(topic, facts, expected=None)
        for number in range(facts.partitions):
            start, end = await book.log.start(topic, number), await book.log.end(topic, number)
            records = await read_all(book.log, topic, number, start=start, stop=end)
            if records:
                await replicate_slice(fresh.store, topic, number, records, facts)
    return await rows_of(fresh.store, topics)
