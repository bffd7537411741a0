"""Replication without Spark, for benchmarks that need a store that has caught up."""

from __future__ import annotations

from tidebook.replication.partition import LogAndStore, PartitionReplicator
from tidebook.wiring.book import Book


async def replicate(book: Book, topic: str) -> None:
    """Bring what the store lacks of a topic's log into it."""
    config = await book.store.topic_config(topic)
    assert config is not None
    parts = LogAndStore(book.log, book.store)
    for partition in range(config.partitions):
        replicator = PartitionReplicator(parts, topic, partition, config)
        await replicator.catch_up(await book.log.end(topic, partition))
