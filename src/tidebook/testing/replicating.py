"""Replication in a test's own hands: as far as it wants, in batches as large as it wants."""

from __future__ import annotations

from tidebook.core.errors import Fenced
from tidebook.core.topic import TopicFacts
from tidebook.log.port import Log
from tidebook.pipeline.slice import replicate_slice
from tidebook.store.port import StoreWriter


async def replicate(
    log: Log,
    store: StoreWriter,
    topic: str,
    *,
    batch_records: int = 1000,
    batches_max: int | None = None,
    clear_tags: bool = True,
) -> None:
    """Bring every partition of a topic from its pointer to the log's end, or `batches_max` batches further."""
    facts = await store.facts(topic)
    assert facts is not None, f"topic {topic} was never opened"
    for partition in range(facts.partitions):
        await _replicate_partition(log, store, topic, partition, facts, batch_records, batches_max, clear_tags)


async def _replicate_partition(
    log: Log,
    store: StoreWriter,
    topic: str,
    partition: int,
    facts: TopicFacts,
    batch_records: int,
    batches_max: int | None,
    clear_tags: bool,
) -> None:
    end, done = await log.end(topic, partition), 0
    while batches_max is None or done < batches_max:
        start = await _wanted(store, topic, partition, facts)
        if start >= end:
            return
        batch = await log.read(topic, partition, start=start, stop=end, limit=batch_records)
        try:
            await replicate_slice(
                store, topic, partition, batch.records, facts,
                start=start, stop=batch.next_offset, clear_tags=clear_tags,
            )  # fmt: skip
        except Fenced:
            continue  # another replicator was quicker: plan anew
        done += 1


async def _wanted(store: StoreWriter, topic: str, partition: int, facts: TopicFacts) -> int:
    """The next offset that the store waits for."""
    pointer = await store.pointer(topic, partition)
    if pointer is None or pointer.position.epoch != facts.epoch:
        return 0
    return pointer.position.offset + 1
