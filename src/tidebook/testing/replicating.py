"""Replicate a topic within a test, up to a chosen point and in batches of a chosen size."""

from __future__ import annotations

from collections.abc import Sequence

from tidebook.core.errors import Fenced
from tidebook.core.replication_plan import Pointer, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Log, Record
from tidebook.replication.slice import plan_slice
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
    """Replicate every partition of a topic from its pointer to the end of the log, or at most `batches_max` batches."""
    config = await store.topic_config(topic)
    if config is None:
        return  # the topic was never written to
    for partition in range(config.partitions):
        await _replicate_partition(log, store, topic, partition, config, batch_records, batches_max, clear_tags)


async def _replicate_partition(
    log: Log,
    store: StoreWriter,
    topic: str,
    partition: int,
    config: TopicConfig,
    batch_records: int,
    batches_max: int | None,
    clear_tags: bool,
) -> None:
    end, done = await log.end(topic, partition), 0
    while batches_max is None or done < batches_max:
        start = first_unreplicated_offset(await store.pointer(topic, partition), topic, partition, config)
        if start >= end:
            return
        batch = await log.read(topic, partition, start=start, stop=end, limit=batch_records)
        try:
            await replicate_slice(
                store, topic, partition, batch.records, config,
                start=start, stop=batch.next_offset, clear_tags=clear_tags,
            )  # fmt: skip
        except Fenced:
            continue  # another replicator was faster: plan the next slice from its pointer
        done += 1


async def replicate_slice(
    store: StoreWriter,
    topic: str,
    partition: int,
    records: Sequence[Record],
    config: TopicConfig,
    *,
    start: int | None = None,
    stop: int | None = None,
    clear_tags: bool = True,
) -> Pointer | None:
    """Plan and apply a slice; return the partition's pointer afterwards.

    If a newer version of Tidebook wrote one of the records, replicate those before it, then raise `UnknownVersion`.
    """
    plan = await plan_slice(store, topic, partition, records, config, start=start, stop=stop, clear_tags=clear_tags)
    if plan.writes is not None:
        await store.apply(plan.writes)
    if plan.stopped_by is not None:
        raise plan.stopped_by
    return plan.pointer
