"""Warn of records that a read does not return because they are in the log but not replicated yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.core.replication_plan import Pointer
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Log
from tidebook.pipeline.worker import SparkWorker
from tidebook.replication.slice import first_unreplicated_offset
from tidebook.runtime.clock import Clock
from tidebook.wiring.spark import has_part

LOGGER = logging.getLogger("tidebook.pipeline")
#: The most unreplicated records of a partition that are read to tell events from marks.
LOOK_RECORDS_MAX = 1_000
#: A log that is unavailable must not delay a read that needs only the store.
LOOK_S = 5.0


class Lag(msgspec.Struct, frozen=True):
    """The unreplicated records of a topic."""

    topic: str
    records: int
    #: How long the oldest of the records has waited.
    seconds: float

    def __str__(self) -> str:
        return (
            f"topic {self.topic}: {self.records:,} records of the log are not in the store yet, the oldest since "
            f"{self.seconds:,.1f} s: their events are missing from this read. "
            "Run 'tidebook pipeline replicate' to bring them there"
        )


async def warn_of_lag(
    worker: SparkWorker,
    topic: str,
    config: TopicConfig,
    pointers: Mapping[int, Pointer],
    *,
    partitions: Collection[int],
    stops: Mapping[int, int],
    clock: Clock,
) -> None:
    """Log a warning if the log holds records after a read's `pointers` and before its `stops`."""
    if not has_part(worker.settings, "log"):
        return
    try:
        async with asyncio.timeout(LOOK_S):
            lag = await find_lag(
                await worker.log(), topic, config, pointers, partitions=partitions, stops=stops, now_ms=clock.now_ms()
            )
    except (TidebookError, TimeoutError) as error:
        LOGGER.warning("topic %s: this read returns what the store holds; the log's end is unknown: %s", topic, error)
        return
    if lag is not None:
        LOGGER.warning("%s", lag)


async def find_lag(
    log: Log,
    topic: str,
    config: TopicConfig,
    pointers: Mapping[int, Pointer],
    *,
    partitions: Collection[int],
    stops: Mapping[int, int],
    now_ms: int,
) -> Lag | None:
    """Return the lag of the store after `pointers`, or None if it consists of marks only."""
    starts = {
        number: first_unreplicated_offset(pointers.get(number), topic, number, config) for number in sorted(partitions)
    }
    found = [await _waiting(log, topic, number, first, stops.get(number)) for number, first in starts.items()]
    waiting = [each for each in found if each is not None]
    if not waiting:
        return None
    oldest_ms = min(since_ms for _, since_ms in waiting)
    return Lag(topic, sum(records for records, _ in waiting), max(0, now_ms - oldest_ms) / 1000)


async def _waiting(log: Log, topic: str, partition: int, first: int, stop: int | None) -> tuple[int, int] | None:
    """Return the number of unreplicated records of a partition and the timestamp of the oldest, or None.

    Marks among the first `LOOK_RECORDS_MAX` records are not counted.
    """
    end = await log.end(topic, partition)
    if stop is not None:
        end = min(end, stop)
    start = max(first, await log.start(topic, partition))
    if start >= end:
        return None
    page = await log.read(topic, partition, start=start, stop=end, limit=LOOK_RECORDS_MAX)
    written = [record for record in page.records if record.key is not None]  # marks have no key
    left = end - page.next_offset
    if not written and left <= 0:
        return None
    oldest = written or page.records
    return len(written) + max(0, left), oldest[0].timestamp_ms if oldest else 2**62
