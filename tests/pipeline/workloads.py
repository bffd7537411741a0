"""Write the histories of the pipeline's tests, and return the rows of a store in a form that can be compared."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from tidebook.core.event import Event
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.record import MAGIC
from tidebook.core.replication_plan import EventRow, TagPosition, TagRow
from tidebook.log.port import Outgoing, read_all
from tidebook.store.port import StoreWriter
from tidebook.testing.replicating import replicate_slice
from tidebook.wiring.book import Book

TAG = "paid"


async def write_history(book: Book, topic: str, *, ids: int = 20, steps: int = 300, seed: int = 1) -> None:
    """Write appends of all kinds, deletes and purges, in a seeded order."""
    draw = random.Random(seed)
    journal = book.journal(topic)
    for step in range(steps):
        id = f"o-{draw.randrange(ids)}"
        kind = draw.random()
        if kind < 0.85:
            tags = {TAG} if draw.random() < 0.2 else ()
            events = [Event({"step": step, "i": i}, tags=tags) for i in range(draw.choice([1, 1, 1, 3]))]
            await journal.append(id, events)
        elif kind < 0.95:
            await journal.delete(id, to=draw.randint(1, 10))
        else:
            await journal.purge(id)


async def write_garbage(book: Book, topic: str, id: str = "o-1", *, value: bytes = b"garbage") -> int:
    """Append a record that cannot be decoded; return its offset."""
    config = await book.journal(topic).create()
    partition = partition_of(id, config.partitions)
    return (await book.log.append(Outgoing(topic, partition, id.encode(), value))).offset


def newer_record() -> bytes:
    """Return a valid record of a version newer than the known ones."""
    from zlib import crc32

    rest = b"from the future"
    return bytes([MAGIC, 99]) + crc32(rest, crc32(bytes([99]))).to_bytes(4, "big") + rest


async def rows_of(store: StoreWriter, topic: str) -> dict[str, Any]:
    """Return everything that replication writes: pointers, heads, graves, events, tags, parked records."""
    config = await store.topic_config(topic)
    assert config is not None
    heads: dict[str, Head] = {}
    events: dict[str, list[EventRow]] = {}
    async for id in store.ids(topic):
        head = heads[id] = await _head(store, Key(topic, id))
        page = await store.events(Key(topic, id), head, after=0, to=head.seq_nr, limit=100_000)
        events[id] = [msgspec.structs.replace(row, time_ms=0) for row in page]
    return {
        "pointers": [await store.pointer(topic, number) for number in range(config.partitions)],
        "heads": heads,
        "graves": await _graves(store, topic),
        "events": events,
        "tags": await _tag_rows(store, topic),
        "parked": [each async for each in store.parked(topic)],
    }


async def _graves(store: StoreWriter, topic: str) -> dict[str, Head]:
    found: dict[str, Head] = {}
    for split in await store.splits(topic, count=1):
        async for page in store.heads_in(topic, split):
            found |= {id: head for id, head in page if not head.live}
    return found


async def _tag_rows(store: StoreWriter, topic: str) -> list[TagRow]:
    """Return the topic's rows of the tag that histories use; on real servers other topics have it as well."""
    found: list[TagRow] = []
    after: TagPosition | None = None
    while page := await store.tag_rows(TAG, after=after, from_ms=0, until_ms=2**62, limit=5_000):
        found += [row for row in page if row.topic == topic]
        after = page[-1].place
    return found


async def _head(store: StoreWriter, key: Key) -> Head:
    head = await store.head(key)
    assert head is not None
    return head


async def expected_rows(book: Book, fresh: Book, topic: str) -> Mapping[str, Any]:
    """Return the rows that one pass over the log in this process writes to another book's store."""
    config = await book.store.topic_config(topic)
    assert config is not None
    await fresh.store.set_topic_config(topic, config, expected=None)
    await replicate_here(book, fresh.store, topic)
    return await rows_of(fresh.store, topic)


async def replicate_here(book: Book, store: StoreWriter, topic: str) -> None:
    """Replicate all of the log in this process, without Spark."""
    config = await book.store.topic_config(topic)
    assert config is not None
    for number in range(config.partitions):
        pointer = await store.pointer(topic, number)
        start = 0 if pointer is None else pointer.position.offset + 1
        end = await book.log.end(topic, number)
        records = await read_all(book.log, topic, number, start=start, stop=end)
        await replicate_slice(store, topic, number, records, config, start=start, stop=end)


async def lose_log(book: Book, topic: str) -> None:
    """Replace the log with an empty one, as after its loss; no process has adopted it yet."""
    config = await book.store.topic_config(topic)
    assert config is not None
    await book.log.delete_topic(topic)
    await book.log.create_topic(topic, config.partitions)
    await book.__aexit__(None, None, None)
    await book.__aenter__()
