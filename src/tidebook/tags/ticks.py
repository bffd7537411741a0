"""Ticks: marks that move the time of idle partitions on, so that they do not hold the horizon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tidebook.core.action import Mark
from tidebook.core.record import encode_record
from tidebook.log.port import Log, Outgoing
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import NEVER_MS


async def tick(log: Log, store: StoreWriter, topics: Iterable[str] | None = None) -> int:
    """Write to every partition that is behind a tick just above the greatest time seen; returns how many.

    Once they are replicated, everything that was in the store before is below the horizon.
    """
    facts = {topic: await store.facts(topic) for topic in (topics or await store.topics())}
    pointers = {topic: await store.pointers(topic) for topic in facts}
    most_ms = max((each.time_ms for of in pointers.values() for each in of.values()), default=NEVER_MS)
    records = []
    for topic, known in facts.items():
        if known is None:
            continue
        value = encode_record(Mark(known.epoch, most_ms + 1), limit_bytes=known.limit_bytes)
        for partition in range(known.partitions):
            pointer = pointers[topic].get(partition)
            if pointer is None or pointer.time_ms <= most_ms:
                records.append(Outgoing(topic, partition, None, value))
    await asyncio.gather(*(log.append(record) for record in records))
    return len(records)
