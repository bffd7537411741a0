"""Ticks for tests: sent and replicated at once."""

from __future__ import annotations

from collections.abc import Sequence

from tidebook.log.port import Log
from tidebook.replication.ticks import partition_replicators, send_ticks
from tidebook.store.port import StoreWriter


async def replicate_ticks(log: Log, store: StoreWriter, topics: Sequence[str] = ()) -> int:
    """Send ticks and replicate up to them, so that everything stored before is below the horizon.

    Return how many records were replicated; a book without tags gets no ticks.
    """
    ticks = await send_ticks(log, store, topics)
    replicators = await partition_replicators(log, store, ticks)
    for partition, each in replicators.items():
        await each.catch_up(ticks[partition] + 1)
    return sum(each.records for each in replicators.values())
