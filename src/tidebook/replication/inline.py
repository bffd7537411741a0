"""Replicate as tasks of the process that has the book open: the same slices and ticks as the Spark job, without a JVM.

One of several processes is active, the one that holds a lock; the others try to take it once a second, and seize it
from one that does not respond. The lock only saves work: slices are fenced, so that any number of replicators, Spark's
included, may run side by side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, assert_never

import msgspec

from tidebook.core.errors import Fenced, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.topic import begin_epoch, check_topic
from tidebook.log.port import Log
from tidebook.replication.partition import REASON_CHARS_MAX, LogAndStore, Partition, PartitionReplicator
from tidebook.replication.status import JobStatus, partition_statuses, this_process, topic_configs, write_job_status
from tidebook.replication.ticks import Ticker, TickIntervals, needs_ticks, partition_replicators
from tidebook.replication.ticks import tick as append_ticks
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.clock import Clock
from tidebook.runtime.futures import cancel_and_wait
from tidebook.runtime.metrics import Metrics
from tidebook.runtime.process import generation
from tidebook.store.port import StoreWriter

LOGGER = logging.getLogger("tidebook.replication")

#: How often a passive process tries to take over.
LOCK_EVERY_S = 1.0
#: How long the holder of the lock may be silent before it is reported, and before the lock is seized.
SILENT_S = 3.0
SEIZE_S = 10.0
#: How often topics are listed if no wake-up comes, and the shortest pause between two listings.
LIST_EVERY_S = 1.0
LIST_PAUSE_S = 0.05
#: The first and the longest pause after a failure. A partition that a record has stopped is retried after the longest.
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
STATUS_EVERY_S = 5.0
#: How long closing waits for records that were appended before it.
DRAIN_S = 1.0
#: A tick costs one commit of the log and one of the store, both without a round trip.
INTERVALS = TickIntervals(followed_s=0.01, idle_s=0.25, pause_s=0.002, check_s=0.1)
#: Errors after which the same records are tried again soon, with the topic's current configuration.
TRANSIENT = (Unavailable, OutcomeUnknown, Fenced)


class ReplicatorLock(Protocol):
    """Decides which process is active; it must be released when its holder's process ends."""

    def take(self) -> bool:
        """Take the lock, or keep it and show that this process responds; return False if another one holds it."""
        ...

    def last_beat(self) -> int | None:
        """Return a number that changes whenever the holder shows that it responds; None if that is unknown."""
        ...

    def seize(self) -> None:
        """Take the lock from a holder that does not respond."""
        ...

    def release(self) -> None:
        """Release the lock, if it is held."""
        ...


class NoLock:
    """A lock for a replicator that needs no coordination, because its slices are fenced."""

    def take(self) -> bool:
        """Return True."""
        return True

    def last_beat(self) -> int | None:
        """Return None: there is no holder to watch."""
        return None

    def seize(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


#: `passive`: another process replicates. `waiting`: the book has no topic yet, or its files cannot be used.
InlineState = Literal["starting", "active", "passive", "waiting", "closed"]


class InlineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state and the counts of the inline replication of this process."""

    state: InlineState
    #: How many slices and records it has replicated, and how many records it has parked.
    batches: int = 0
    records: int = 0
    parked: int = 0
    #: Why a partition is stopped, by topic/partition; each is retried.
    stopped: dict[str, str] = {}
    #: The number of failures, and the last error.
    failures: int = 0
    last_error: str | None = None
    #: Why nothing is replicated although another process holds the lock; None if that process responds.
    silent_holder: str | None = None

    def as_row(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        return msgspec.structs.asdict(self)

    def describe(self) -> str:
        """Return one line of text."""
        match self.state:
            case "passive":
                text = f"passive: {self.silent_holder or 'another process replicates'}"
            case "waiting":
                text = f"waiting: {self.last_error or 'there is no topic yet'}"
            case "active":
                text = "running"
            case "starting" | "closed":
                text = self.state
            case _:
                assert_never(self.state)
        if self.stopped:
            name, reason = next(iter(self.stopped.items()))
            text += f", {len(self.stopped):,} partitions are stopped: {name}: {reason}"
        return text


class InlineReplication:
    """Replicates every partition of the book's topics, or of the given ones, until it is closed."""

    def __init__(
        self,
        log: Log,
        store: StoreWriter,
        *,
        clock: Clock,
        metrics: Metrics,
        lock: ReplicatorLock | None = None,
        clear_tags: bool = True,
        topics: Iterable[str] = (),
    ) -> None:
        self._log = log
        self._store = store
        self._parts = LogAndStore(log, store)
        self._clock = clock
        self._metrics = metrics
        self._lock = lock or NoLock()
        self._clear_tags = clear_tags
        self._topics = tuple(topics)
        self._generation = generation()
        self._task: asyncio.Task[None] | None = None
        self._ticker: Ticker | None = None
        self._following: dict[str, tuple[TopicConfig, asyncio.Task[None]]] = {}
        self._state: InlineState = "starting"
        self._batches = self._records = self._parked = self._failures = 0
        self._batch_s = self._records_per_s = 0.0
        self._stopped: dict[str, str] = {}
        self._last_error: str | None = None
        self._beat: tuple[int | None, float] = (None, 0.0)
        self._silent_holder: str | None = None
        self._written_s = -STATUS_EVERY_S

    def start(self) -> None:
        """Start the tasks on the running loop."""
        self._task = asyncio.create_task(self.run(), name="tidebook-replication")

    async def close(self) -> None:
        """Replicate the appended records, for at most a second, then stop and let another process take over."""
        if self._generation != generation():
            return
        if self._task is not None:
            if self._state == "active":
                try:
                    async with asyncio.timeout(DRAIN_S):
                        await self._drain()
                except (TidebookError, TimeoutError):  # the next replicator continues from the pointers
                    pass
            await cancel_and_wait(self._task)
        self._state = "closed"

    async def _drain(self) -> None:
        """Replicate the log's records, and useful ticks, so that a script's events are visible when it ends."""
        await self._catch_up(await _log_ends(self._log, await topic_configs(self._store, self._topics)))
        if self._ticker is not None:
            await self._catch_up({partition: offset + 1 for partition, offset in (await self._ticker.tick()).items()})

    async def _catch_up(self, stops: Mapping[Partition, int]) -> None:
        replicators = await partition_replicators(self._log, self._store, stops, clear_tags=self._clear_tags)
        await asyncio.gather(*(each.catch_up(stops[partition]) for partition, each in replicators.items()))

    def status(self) -> InlineStatus:
        """Return the current status."""
        return InlineStatus(
            state=self._state,
            batches=self._batches,
            records=self._records,
            parked=self._parked,
            stopped=dict(self._stopped),
            failures=self._failures,
            last_error=self._last_error,
            silent_holder=self._silent_holder,
        )

    async def run(self) -> None:
        """Replicate until cancelled; be passive while another process holds the lock."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        since = -1
        try:
            while self._generation == generation():
                try:
                    if not await self._store.topics():  # nothing to do, and a missing folder is not created
                        self._state = "waiting"
                        since = await self._store.wait_any(timeout_s=LIST_EVERY_S, since=since)
                    elif not self._lock.take():
                        self._state = "passive"
                        self._watch_holder()
                        await asyncio.sleep(LOCK_EVERY_S)
                    else:
                        self._state, self._silent_holder = "active", None
                        await self._replicate(backoff)
                except Exception as error:  # without this task nothing would be replicated
                    self._state = "waiting"
                    self._failed("replication", error)
                    await asyncio.sleep(backoff.next_s())
        finally:
            self._lock.release()

    def _watch_holder(self) -> None:
        """Report a holder of the lock that is silent, such as a stopped process; after `SEIZE_S` seize the lock."""
        beat, now_s = self._lock.last_beat(), time.monotonic()
        if beat is None or beat != self._beat[0]:
            self._beat = (beat, now_s)
        silent_s = now_s - self._beat[1]
        if silent_s < SILENT_S:
            self._silent_holder = None
            return
        self._silent_holder = f"the process that replicates has not responded for {silent_s:.0f} s"
        if silent_s >= SEIZE_S:
            LOGGER.warning("%s: this one takes over", self._silent_holder)
            self._lock.seize()

    async def _replicate(self, backoff: Backoff) -> None:
        """Follow all partitions until another process has the lock, or the topics cannot be read."""
        self._ticker = Ticker(self._log, self._store, self._topics, intervals=INTERVALS)
        ticking = asyncio.create_task(self._ticker.run_woken(self._metrics))
        since = -1
        try:
            while self._generation == generation() and self._lock.take():
                await self._follow_topics(await topic_configs(self._store, self._topics))
                backoff.reset()
                await self._write_status()
                await asyncio.sleep(LIST_PAUSE_S)
                since = await self._store.wait_any(timeout_s=LIST_EVERY_S, since=since)
        finally:
            following, self._following = [task for _, task in self._following.values()], {}
            await cancel_and_wait(ticking, *following)
            self._stopped = {}  # this process retries none of them any more

    async def _follow_topics(self, configs: dict[str, TopicConfig]) -> None:
        """Follow new topics, stop following deleted ones, and restart those whose configuration has changed."""
        ended = [topic for topic, (config, _) in self._following.items() if configs.get(topic) != config]
        await cancel_and_wait(*(self._following.pop(topic)[1] for topic in ended))
        self._stopped = {name: why for name, why in self._stopped.items() if name.rpartition("/")[0] in self._following}
        for topic, config in configs.items():
            if topic not in self._following:
                task = asyncio.create_task(self._follow_topic(topic, config), name=f"tidebook-replication {topic}")
                self._following[topic] = (config, task)

    async def _follow_topic(self, topic: str, config: TopicConfig) -> None:
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        numbers = range(config.partitions)
        while True:
            try:
                await check_topic(self._log, self._store, topic, config)
                await begin_epoch(self._store, topic, config)
                break
            except TRANSIENT as error:
                self._failed(topic, error)
                await asyncio.sleep(backoff.next_s())
            except TidebookError as error:
                for number in numbers:
                    self._stop_partition(f"{topic}/{number}", error)
                await asyncio.sleep(backoff.next_s())
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                self._stopped.pop(f"{topic}/{number}", None)
                group.create_task(self._follow_partition(topic, number, config))

    async def _follow_partition(self, topic: str, partition: int, config: TopicConfig) -> None:
        """Replicate a partition whenever it has new records; retry failures, with a growing pause."""
        name, backoff = f"{topic}/{partition}", Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        while True:
            replicator = PartitionReplicator(self._parts, topic, partition, config, clear_tags=self._clear_tags)
            try:
                while replicator.stopped is None:
                    first = await replicator.next_offset()
                    if name in self._stopped and await self._log.end(topic, partition) <= first:
                        del self._stopped[name]  # another replicator has replicated the record
                    await self._log.wait(topic, partition, offset=first)
                    began_s, before = time.monotonic(), (replicator.records, replicator.parked)
                    await replicator.catch_up(await self._log.end(topic, partition))
                    self._count(topic, partition, replicator, before, time.monotonic() - began_s)
                    if replicator.stopped is None:
                        self._stopped.pop(name, None)
                        backoff.reset()
                self._stopped[name] = replicator.stopped
                await asyncio.sleep(RETRY_MAX_S)
            except Exception as error:  # without this task the partition would hold the horizon back forever
                if isinstance(error, TRANSIENT):
                    self._failed(name, error)
                else:
                    self._stop_partition(name, error)
                await asyncio.sleep(backoff.next_s())

    def _count(
        self, topic: str, partition: int, replicator: PartitionReplicator, before: tuple[int, int], seconds: float
    ) -> None:
        records, parked = replicator.records - before[0], replicator.parked - before[1]
        self._batches += 1
        self._records += records
        self._parked += parked
        self._batch_s, self._records_per_s = seconds, records / seconds if seconds else 0.0
        self._metrics.count("pipeline_records", records, topic=topic, partition=partition)
        self._metrics.count("pipeline_parked", parked, topic=topic)
        self._metrics.time("pipeline_task", seconds)

    def _stop_partition(self, name: str, error: Exception) -> None:
        self._stopped[name] = _reason(error)
        self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        """Remember an error; log it if it differs from the last one."""
        self._failures += 1
        text = f"{name}: {_reason(error)}"[:REASON_CHARS_MAX]
        if text != self._last_error:
            expected = isinstance(error, TidebookError)
            LOGGER.warning("%s failed, and is retried", text, exc_info=None if expected else error)
        self._last_error = text

    async def _write_status(self) -> None:
        """Store the status for `tidebook pipeline status`, every five seconds."""
        self._metrics.gauge("pipeline_stopped_partitions", len(self._stopped))
        if time.monotonic() - self._written_s < STATUS_EVERY_S:
            return
        self._written_s = time.monotonic()
        configs, now_ms = await topic_configs(self._store, self._topics), self._clock.now_ms()
        for each in await partition_statuses(self._log, self._store, configs, now_ms=now_ms):
            self._metrics.gauge("pipeline_lag_records", each.lag, topic=each.topic, partition=each.partition)
            self._metrics.gauge("pipeline_lag_seconds", each.lag_s, topic=each.topic, partition=each.partition)
        status = JobStatus(
            at_ms=now_ms,
            batches=self._batches,
            records=self._records,
            parked=self._parked,
            records_per_s=self._records_per_s,
            batch_s=self._batch_s,
            stopped=dict(self._stopped),
            engine="inline",
            process=this_process(),
        )
        try:
            await write_job_status(self._store, status)
        except TidebookError as error:  # replication does not depend on the status
            self._metrics.count("pipeline_status_failures")
            LOGGER.warning("the status for 'tidebook pipeline status' could not be written: %s", error)


class ReplicatedToEnd(msgspec.Struct, frozen=True):
    """The result of `replicate_to_end`."""

    batches: int
    records: int
    parked: int
    #: Why a partition is stopped, by topic/partition.
    stopped: dict[str, str]


async def replicate_to_end(
    log: Log, store: StoreWriter, topics: Iterable[str] = (), *, clear_tags: bool = True, tick: bool = False
) -> ReplicatedToEnd:
    """Replicate the records that the log has now, then ticks, so that the horizon passes them.

    Other replicators may run at the same time. Without tags and followers ticks are useless, and are only written with
    `tick`. A stopped partition is reported and holds the horizon back.
    """
    configs = await topic_configs(store, tuple(topics))
    for topic, config in configs.items():
        await check_topic(log, store, topic, config)
        await begin_epoch(store, topic, config)
    stops = await _log_ends(log, configs)
    replicators = await partition_replicators(log, store, stops, clear_tags=clear_tags)
    await asyncio.gather(*(each.catch_up(stops[partition]) for partition, each in replicators.items()))
    ticked = bool(configs) and (tick or await needs_ticks(store))  # without a topic, all topics would get ticks
    ticks = await append_ticks(log, store, tuple(configs)) if ticked else {}
    await asyncio.gather(*(replicators[partition].catch_up(offset + 1) for partition, offset in ticks.items()))
    done = replicators.values()
    return ReplicatedToEnd(
        sum(each.slices for each in done),
        sum(each.records for each in done),
        sum(each.parked for each in done),
        {f"{each.topic}/{each.partition}": each.stopped for each in done if each.stopped is not None},
    )


async def _log_ends(log: Log, configs: Mapping[str, TopicConfig]) -> dict[Partition, int]:
    partitions = [(topic, number) for topic, config in configs.items() for number in range(config.partitions)]
    return {partition: await log.end(*partition) for partition in partitions}


def _reason(error: Exception) -> str:
    """Return the message of one of Tidebook's errors; of any other the type, since its message may hold a payload."""
    text = str(error) if isinstance(error, TidebookError) else ""
    return (text or type(error).__name__)[:REASON_CHARS_MAX]
