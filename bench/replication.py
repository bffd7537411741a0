"""Replication without Spark, for benchmarks that need a store that has caught up."""

from __future__ import annotations

from tidebook.replication.slice import first_unreplicated_offset, replicate_slice
from tidebook.wiring.book import Book


async def replicate(book: Book, topic: str) -> None:
    """Bring what the store lacks of a topic's log into it."""
    config = await book.store.topic_config(topic)
    assert config is not None
    for partition in range(config.partitions):
        start = first_unreplicated_offset(await book.store.pointer(topic, partition), topic, partition, config)
        end = await book.log.end(topic, partition)
        while start < end:
            batch = await book.log.read(topic, partition, start=start, stop=end, limit=10_000)
            stop = batch.next_offset
            await replicate_slice(book.store, topic, partition, batch.records, config, start=start, stop=stop)
            start = stop
