"""Replication without Spark, for benchmarks that need a fully replicated store."""

from __future__ import annotations

from tidebook.replication.partition import LogAndStore, PartitionReplicator
from tidebook.wiring.book import Book


async def replicate(book: Book, topic: str) -> None:
    """Replicate all of a topic's log to the store."""
    config = await book.store.topic_config(topic)
    assert config is not None
    parts = LogAndStore(book.log, book.store)
    for partition in range(config.partitions):
        replicator = PartitionReplicator(parts, topic, partition, config)
        await replicator.catch_up(await book.log.end(topic, partition))
