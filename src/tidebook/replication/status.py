"""Determine how far topics are replicated: first unreplicated offsets, lag, lost records, and a run's last report."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from tidebook.core.errors import Corrupt, LogLost, NotFound, Unavailable
from tidebook.core.position import Position
from tidebook.core.replication_plan import Pointer, SliceWrites, first_unreplicated_offset
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.topic import begin_epoch, check_topic
from tidebook.log.port import Log
from tidebook.store.port import StoreWriter

JOB_STATUS_SETTING = "pipeline/replicate"
#: The most unreplicated records of a partition that are read to distinguish events from marks.
LOOK_RECORDS_MAX = 1_000


class PartitionStatus(msgspec.Struct, frozen=True):
    """The replication status of one log partition."""

    topic: str
    partition: int
    epoch: int
    #: The log's first offset, and the offset of its next record.
    start: int
    end: int
    #: The first unreplicated offset.
    replicated: int
    #: The number of unreplicated records, and the age of the first.
    lag: int
    lag_s: float

    @property
    def lost(self) -> LostOffsets | None:
        """Return the offsets that the log lost before they were replicated, if any."""
        if self.start <= self.replicated:
            return None
        return LostOffsets(self.topic, self.partition, self.replicated, self.start - 1)


class LostOffsets(msgspec.Struct, frozen=True):
    """Offsets that the log lost before they were replicated."""

    topic: str
    partition: int
    first: int
    last: int


async def topic_configs(store: StoreWriter, topics: Sequence[str] = ()) -> dict[str, TopicConfig]:
    """Return the configurations of these topics, or of all; topics that were never written are left out."""
    found = {topic: await store.topic_config(topic) for topic in topics or sorted(await store.topics())}
    return {topic: config for topic, config in found.items() if config is not None}


async def partition_statuses(
    log: Log, store: StoreWriter, configs: Mapping[str, TopicConfig], *, now_ms: int
) -> list[PartitionStatus]:
    """Return the status of all partitions of these topics; raise `Fenced` if a configuration is outdated."""
    reads = [
        _status(log, store, topic, number, each, now_ms)
        for topic, each in configs.items()
        for number in range(each.partitions)
    ]
    return list(await asyncio.gather(*reads))


async def _status(
    log: Log, store: StoreWriter, topic: str, partition: int, config: TopicConfig, now_ms: int
) -> PartitionStatus:
    # The pointer is read first, so that concurrent replication makes the lag too large and never negative.
    pointer = await store.pointer(topic, partition)
    start, end = await asyncio.gather(log.start(topic, partition), log.end(topic, partition))
    replicated = first_unreplicated_offset(pointer, topic, partition, config)
    lag = max(0, end - max(replicated, start))
    since_ms = now_ms
    if lag:
        if pointer is not None:  # used if the log cannot be read
            since_ms = pointer.time_ms
        try:
            page = await log.read(topic, partition, start=max(replicated, start), stop=end, limit=1)
            since_ms = page.records[0].timestamp_ms if page.records else since_ms
        except (LogLost, Unavailable):
            pass
    return PartitionStatus(
        topic, partition, config.epoch, start, end, replicated, lag, max(0, now_ms - since_ms) / 1000
    )


async def find_starts(log: Log, store: StoreWriter, configs: Mapping[str, TopicConfig]) -> dict[str, dict[str, int]]:
    """Return the first unreplicated offset of every partition; raise `LogLost` if the log begins after one."""
    return starts_of(await check_partitions(log, store, configs, now_ms=0))


async def check_partitions(
    log: Log, store: StoreWriter, configs: Mapping[str, TopicConfig], *, now_ms: int
) -> list[PartitionStatus]:
    """Return the status of all partitions; raise `LogLost` if the log begins after a first unreplicated offset."""
    for topic, each in configs.items():
        await check_topic(log, store, topic, each)
        await begin_epoch(store, topic, each)
    statuses = await partition_statuses(log, store, configs, now_ms=now_ms)
    for status in statuses:
        if (lost := status.lost) is not None:
            raise LogLost(
                **msgspec.structs.asdict(lost),
                remedy="restore the log, or continue without them: tidebook pipeline replicate --accept-loss",
            )
    return statuses


async def find_other_logs(log: Log, store: StoreWriter, configs: Mapping[str, TopicConfig]) -> dict[str, str]:
    """Return the reason for each topic that is not in the configured log: it was deleted, or created again."""
    reasons = {}
    for topic, each in configs.items():
        try:
            await check_topic(log, store, topic, each)
        except (Corrupt, NotFound) as error:
            reasons[topic] = str(error)
    return reasons


def starts_of(statuses: Sequence[PartitionStatus]) -> dict[str, dict[str, int]]:
    """Return the first unreplicated offset of every partition, by topic."""
    starts: dict[str, dict[str, int]] = {}
    for each in statuses:
        starts.setdefault(each.topic, {})[str(each.partition)] = each.replicated
    return starts


async def accept_losses(log: Log, store: StoreWriter, topics: Sequence[str] = ()) -> list[LostOffsets]:
    """Move the pointers to the log's start, and return the offsets that are skipped.

    Appends after the lost records may get other sequence numbers than were returned to their writers, or become void.
    """
    accepted = []
    for status in await partition_statuses(log, store, await topic_configs(store, topics), now_ms=0):
        if (lost := status.lost) is not None:
            before = await store.pointer(lost.topic, lost.partition)
            pointer = Pointer(Position(status.epoch, lost.last), 0 if before is None else before.time_ms)
            await store.apply(SliceWrites(lost.topic, lost.partition, before, pointer, ()))
            accepted.append(lost)
    return accepted


async def find_lag(
    log: Log,
    topic: str,
    config: TopicConfig,
    pointers: Mapping[int, Pointer],
    *,
    partitions: Collection[int],
    stops: Mapping[int, int],
    now_ms: int,
) -> str | None:
    """Return a warning about the records after `pointers` and before `stops`; None if there are only marks.

    Marks among the first `LOOK_RECORDS_MAX` records of a partition are not counted.
    """
    waiting, oldest_ms = 0, now_ms
    for number in sorted(partitions):
        first = first_unreplicated_offset(pointers.get(number), topic, number, config)
        end = min(await log.end(topic, number), stops.get(number, 2**63))
        start = max(first, await log.start(topic, number))
        if start >= end:
            continue
        page = await log.read(topic, number, start=start, stop=end, limit=LOOK_RECORDS_MAX)
        written = [record for record in page.records if record.key is not None]  # marks have no key
        left = max(0, end - page.next_offset)
        if written or left:
            waiting += len(written) + left
            oldest_ms = min([oldest_ms, *(record.timestamp_ms for record in (written or page.records)[:1])])
    if not waiting:
        return None
    return (
        f"topic {topic}: {waiting:,} records of the log are not in the store yet, the oldest for "
        f"{(now_ms - oldest_ms) / 1000:,.1f} s: their events are missing from this read. "
        "Run 'tidebook pipeline replicate' to replicate them"
    )


#: Where replication runs: in tasks of a process that has the book open, or in a Spark job.
Engine = Literal["inline", "spark"]


class JobStatus(msgspec.Struct, frozen=True):
    """The last reported state of a replication run, stored for `tidebook pipeline status`."""

    at_ms: int
    batches: int
    records: int
    parked: int
    records_per_s: float
    batch_s: float
    #: Why a partition is stopped, by topic/partition.
    stopped: dict[str, str] = {}
    engine: Engine = "spark"
    #: The machine and the process id of the run; Spark's is the driver.
    process: str | None = None


def this_process() -> str:
    """Return the machine's name and the process id, to name this process in a status."""
    return f"{socket.gethostname()}:{os.getpid()}"


async def write_job_status(store: StoreWriter, status: JobStatus) -> None:
    """Write the status; if another run writes at the same moment, either status may win."""
    before = await store.setting(JOB_STATUS_SETTING)
    await store.set_setting(JOB_STATUS_SETTING, msgspec.json.encode(status).decode(), expected=before)


async def read_job_status(store: StoreWriter) -> JobStatus | None:
    """Return the status that was written last, or None if there is none."""
    text = await store.setting(JOB_STATUS_SETTING)
    return None if text is None else msgspec.json.decode(text, type=JobStatus)
