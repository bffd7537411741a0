"""Replicate the log to the store on Spark: leases for the live tail, a Structured Streaming query for a backlog.

The pointers in the store are the only record of progress. Leases and queries start from them. Each query has a new
checkpoint, so an old, copied or lost checkpoint has no effect.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tidebook.core.errors import OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.errors import TRANSIENT, run_with_retries
from tidebook.pipeline.lease import LeaseTask, revoke_leases
from tidebook.pipeline.lease_scheduler import OVERDUE_S, LeaseScheduler
from tidebook.pipeline.replication_query import ReplicationQuery
from tidebook.pipeline.session import PipelineSettings, pipeline_settings
from tidebook.pipeline.stoppable_portal import StoppablePortal
from tidebook.pipeline.task_result import TASK_RESULT_SCHEMA, TaskResult
from tidebook.pipeline.worker import OpenStore, open_settings_store
from tidebook.replication.partition import Partition
from tidebook.replication.status import (
    JobStatus,
    PartitionStatus,
    check_partitions,
    find_other_logs,
    find_starts,
    partition_statuses,
    starts_of,
    this_process,
    topic_configs,
    write_job_status,
)
from tidebook.replication.ticks import Ticker, partition_replicators, send_ticks, ticking
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json
from tidebook.wiring.spark import clears_tags

if TYPE_CHECKING:
    from tidebook.pipeline.source.records import Offsets

LOGGER = logging.getLogger("tidebook.pipeline")
T = TypeVar("T")

#: Without progress, a run with `once` raises a transient error only after this many failures and this much time: on a
#: busy machine a Python worker may need longer to start than the ten seconds that Spark allows.
FAILURES_MAX = 5
FAILING_S = 120.0
RESTART_FIRST_S = 0.5
RESTART_MAX_S = 15.0
#: How long a stop waits for leases, which end within half a second after finishing their current slices.
LEASES_END_S = 1.5
#: How long a stop waits for each request to the log or store, because they may hang: the one in progress, the one that
#: ends the leases, and the one that writes the status.
STOP_REQUEST_S = 1.0
POLL_S = 0.1
#: How often a run with leases checks whether it must stop.
LEASES_POLL_S = 0.05
#: How often a run writes its status to the store.
STATUS_EVERY_S = 5.0
#: The query or the leases are restarted after this many consecutive failures to read the partitions' status.
STATUS_FAILURES_MAX = 5
#: If more records than this precede the final ticks, another query replicates them instead of the driver.
DRIVER_RECORDS_MAX = 20_000


class Progress(msgspec.Struct, frozen=True):
    """The progress of a run."""

    batches: int
    records: int
    seconds: float
    partitions: tuple[PartitionStatus, ...]
    #: Why a partition is stopped, by topic/partition.
    stopped: dict[str, str] = {}
    #: The error that has paused the run, if any.
    waiting: str | None = None
    #: Records that this run parked.
    parked: int = 0
    #: Figures of the latest micro-batch; with leases, the rate between the last two reads of the status, and the
    #: duration of the lease that ended last.
    records_per_s: float = 0.0
    batch_s: float = 0.0

    @property
    def lag(self) -> int:
        """Return the number of unreplicated records."""
        return sum(each.lag for each in self.partitions)


class StatusWatch:
    """Reads the partitions' status of a running replication from time to time."""

    def __init__(self, replication: Replication, every_s: float) -> None:
        self._replication = replication
        self._every_s = every_s
        self._read_s = time.monotonic()
        self._failed = 0
        #: The configurations of the topics when they were last read.
        self.configs: dict[str, TopicConfig] = {}

    def is_due(self) -> bool:
        """Return whether the status is due to be read."""
        return time.monotonic() - self._read_s >= self._every_s

    def read_if_due(self) -> bool:
        """Read the status if due, and return whether it was read; raise only the last of many consecutive failures."""
        if not self.is_due():
            return False
        try:
            self.configs = self._replication.read_status()
        except (Unavailable, OutcomeUnknown) as error:
            self._failed += 1
            if self._failed >= STATUS_FAILURES_MAX:
                raise
            self._replication.metrics.count("pipeline_progress_failures")
            LOGGER.warning("the partitions' status could not be read, the work continues: %s", error)
            return False
        finally:
            self._read_s = time.monotonic()
        self._failed = 0
        return True


class Replication:
    """One run of the job. `run` blocks; `stop` may be called from any thread.

    If `spark` is only a context, a session is started when a query needs one. Leases do not, and its start takes
    seconds.
    """

    def __init__(
        self,
        spark: SparkSession | SparkContext,
        book: Book,
        portal: BlockingPortal,
        *,
        topics: Sequence[str] = (),
        report: Callable[[Progress], None] = lambda progress: None,
        on_batch: Callable[[int, Sequence[TaskResult]], None] = lambda number, done: None,
        opening: OpenStore = open_settings_store,
        checkpoint: Path | None = None,
        stop: threading.Event | None = None,
        settings: PipelineSettings | None = None,
    ) -> None:
        self.metrics = book.metrics
        self._spark = spark
        self._book = book
        self._topics = tuple(topics)
        self._report = report
        self._on_batch = on_batch
        self._opening = opening
        self._checkpoint = checkpoint
        self._settings = settings or pipeline_settings(book.settings)
        self._stop = threading.Event() if stop is None else stop
        self._portal = StoppablePortal(portal, self._stop, within_s=STOP_REQUEST_S)
        self._lock = threading.Lock()
        self._progress = Progress(0, 0, 0.0, ())
        #: While leases run: the first unreplicated offsets and the number of replicated records at their start. A lease
        #: reports its records only at its end, so until then they are counted from the pointers.
        self._leased_from: tuple[dict[Partition, int], int] | None = None
        self._counted: tuple[float, int] | None = None
        #: The configurations of all topics when the latest leases or query began.
        self._known: dict[str, TopicConfig] = {}
        #: The partitions of topics that are not in the configured log.
        self._without_log: set[str] = set()
        self._began = time.monotonic()
        self._status_written = 0.0

    def stop(self) -> None:
        """Stop after the batch or the slices in progress."""
        self._stop.set()

    def progress(self, waiting: str | None = None) -> Progress:
        """Return the progress of the run."""
        return msgspec.structs.replace(self._progress, seconds=time.monotonic() - self._began, waiting=waiting)

    def run(self, *, once: bool = False) -> Progress:
        """Replicate until `stop`; with `once`, up to the log's current end, and make it visible to tag streams."""
        if not once:
            with ticking(self._portal.unbounded, Ticker(self._book.log, self._book.store, self._topics), self.metrics):
                return self._run(once=False)
        self._run(once=True)
        if not self._stop.is_set():
            self._pass_horizon()
        return self.progress()

    def _pass_horizon(self) -> None:
        """Send ticks and replicate up to them, so that the horizon of tag streams passes the replicated events."""
        log, store = self._book.log, self._book.store
        self._leased_from = None
        with self._ignore_transient_after_stop():
            ticks = self._retry(lambda: send_ticks(log, store, self._topics))
            clear_tags = clears_tags(self._book.settings)
            moving = {at: each for at, each in ticks.items() if f"{at[0]}/{at[1]}" not in self._progress.stopped}
            replicators = self._retry(lambda: partition_replicators(log, store, moving, clear_tags=clear_tags))

            async def records_before() -> int:
                return sum([max(0, moving[at] + 1 - await each.next_offset()) for at, each in replicators.items()])

            if self._retry(records_before) > DRIVER_RECORDS_MAX:
                self._run(once=True)
            for at, each in replicators.items():
                if self._stop.is_set():
                    break
                self._retry(partial(each.catch_up, moving[at] + 1))
                self._add(records=each.records, parked=each.parked, stopped={f"{at[0]}/{at[1]}": each.stopped})
            self._publish_status(self._retry(self._read_status)[1], last=True)

    def _retry(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return run_with_retries(
            self._portal, call, stop=self._stop, within_s=FAILING_S,
            report=lambda reason, waited_s: self._report(self.progress(waiting=reason)),
        )  # fmt: skip

    @contextmanager
    def _ignore_transient_after_stop(self) -> Iterator[None]:
        """Ignore transient errors after a stop: a caller that stops a run that retries does not expect its error."""
        try:
            yield
        except TRANSIENT:
            if not self._stop.is_set():
                raise

    def _run(self, *, once: bool) -> Progress:
        failures, backoff = 0, Backoff(first_s=RESTART_FIRST_S, max_s=RESTART_MAX_S)
        moved = time.monotonic()
        while not self._stop.is_set():
            before = self._progress.records
            try:
                if self._run_from_pointers(once=once):
                    break
                failures = 0
                backoff.reset()
            except TidebookError as error:
                if self._stop.is_set():
                    break  # the caller that stopped the run may have stopped Spark too
                if self._progress.records > before:
                    failures, moved = 0, time.monotonic()
                    backoff.reset()
                failures += 1
                cause = self._cause(error)
                if not once and self._topics_changed():
                    self._report(self.progress(waiting=str(cause)))
                    self._stop.wait(backoff.next_s())
                    continue
                over = once and failures >= FAILURES_MAX and time.monotonic() - moved >= FAILING_S
                if over or not isinstance(cause, TRANSIENT):
                    if cause is error:
                        raise
                    raise cause from error
                self._report(self.progress(waiting=str(cause)))
                self._stop.wait(backoff.next_s())
        with self._ignore_transient_after_stop():
            self._publish_status(self._retry(self._read_status)[1], last=True)
        return self.progress()

    def _cause(self, error: TidebookError) -> TidebookError:
        """Return the cause of a failure: the error of `find_starts`, such as lost records, or else the error itself."""
        if not isinstance(error, TRANSIENT):
            try:
                self._portal.run(find_starts(self._book.log, self._book.store, self._configs()))
            except TidebookError as found:
                return found
        return error

    def _topics_changed(self) -> bool:
        """Return whether a change of topics may have caused a failure: the next attempt reads their configurations.

        A topic was deleted from the book, or is not in the configured log until an operator adopts or restores the log.
        """
        try:
            configs = self._configs()
            others = self._portal.run(find_other_logs(self._book.log, self._book.store, configs))
        except TidebookError:
            return False
        return configs != self._known or bool(others)

    def _configs(self) -> dict[str, TopicConfig]:
        return self._portal.run(topic_configs(self._book.store, self._topics))

    def _run_from_pointers(self, *, once: bool) -> bool:
        """Run leases or a query from the pointers; return False if another round of them is needed."""
        book, settings = self._book, self._settings
        configs = self._known = self._configs()
        if not once:
            configs = self._portal.run(self._without_other_logs(configs))
        if not configs:
            self._publish_status(())
            return once or self._stop.wait(settings.look_every_s)
        statuses = self._portal.run(check_partitions(book.log, book.store, configs, now_ms=book.clock.now_ms()))
        self._publish_status(statuses)
        if settings.lease_s == 0:
            return self._run_query(configs, starts_of(statuses), until_end=once) and once
        if self._backlog(statuses) > settings.catch_up_records:
            return self._run_query(configs, starts_of(statuses), until_end=True) and once
        if once:
            return self._run_leases(configs, {(each.topic, each.partition): each.end for each in statuses if each.lag})
        return self._run_leases(configs)

    def _backlog(self, statuses: Sequence[PartitionStatus]) -> int:
        """Return the number of unreplicated records, without stopped partitions, which a catch-up does not advance."""
        stopped = self._progress.stopped
        return sum(each.lag for each in statuses if f"{each.topic}/{each.partition}" not in stopped)

    def _run_leases(self, configs: Mapping[str, TopicConfig], stops: Mapping[Partition, int] | None = None) -> bool:
        """Lease all partitions until `stop`, or up to `stops`; return False if micro-batches must catch up first."""
        settings, run = self._settings, uuid.uuid4().hex[:12]
        # A task that retries for longer than its lease may be overdue would be killed before it can raise the error.
        wait_s = min(settings.wait_s, OVERDUE_S)
        task = partial(LeaseTask, settings_to_json(self._book.settings), wait_s=wait_s, opening=self._opening)
        scheduler = LeaseScheduler(
            self._spark if isinstance(self._spark, SparkContext) else self._spark.sparkContext,
            run=run,
            lease_s=settings.lease_s,
            new_task=lambda lease: task(lease=lease),
            on_end=self._count_lease,
            revoke=partial(self._revoke, run),
        )
        watch = StatusWatch(self, settings.look_every_s)
        replicated = {(each.topic, each.partition): each.replicated for each in self._progress.partitions}
        self._leased_from = (replicated, self._progress.records)
        try:
            scheduler.assign(configs, stops)
            while not self._stop.is_set() and not (stops is not None and scheduler.done):
                scheduler.step(LEASES_POLL_S)
                if watch.read_if_due() and stops is None:
                    if self._backlog(self._progress.partitions) > settings.catch_up_records or not watch.configs:
                        return False
                    scheduler.assign(watch.configs)
            return True
        finally:
            scheduler.close(LEASES_END_S)

    def _revoke(self, run: str, generation: int) -> None:
        try:
            self._portal.run(revoke_leases(self._book.store, run, generation))
        except TidebookError as error:  # the leases then end on time
            LOGGER.warning("the leases of this run could not be ended early: %s", error)

    def _count_lease(self, results: Sequence[TaskResult]) -> None:
        if results:
            seconds = max(each.seconds for each in results)
            self.metrics.time("pipeline_lease", seconds)
            with self._lock:
                self._progress = msgspec.structs.replace(self._progress, batch_s=seconds)
            self._count_batch(self._progress.batches, results)

    def _run_query(self, configs: Mapping[str, TopicConfig], starts: Offsets, *, until_end: bool) -> bool:
        """Run one query; with `until_end`, up to the log's current end. Return False if it must be restarted."""
        self._leased_from = None
        scratch = Path(tempfile.mkdtemp(prefix="tidebook-replicate-"))
        try:
            query = self._start(configs, starts, self._checkpoint or scratch / "checkpoint", once=until_end)
            return self._watch(query, configs, once=until_end)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _start(
        self, configs: Mapping[str, TopicConfig], starts: Offsets, checkpoint: Path, *, once: bool
    ) -> ReplicationQuery:
        # Not at the top, because leases need no Arrow, and importing it would delay their start.
        from tidebook.pipeline.source.records import coalesce_to_cores, stream_records
        from tidebook.pipeline.task import replicate_task

        settings = self._settings
        spark = SparkSession.builder.getOrCreate() if isinstance(self._spark, SparkContext) else self._spark
        records = stream_records(spark, self._book.settings, starts, records_max=settings.records_max)
        task = replicate_task(
            settings_to_json(self._book.settings), dict(configs), wait_s=settings.wait_s, opening=self._opening
        )
        return ReplicationQuery(
            coalesce_to_cores(spark, records).mapInArrow(task, TASK_RESULT_SCHEMA),
            checkpoint,
            trigger_s=None if once else settings.trigger_s,
            on_batch=self._count_batch,
            metrics=self.metrics,
        )

    def _count_batch(self, number: int, done: Sequence[TaskResult]) -> None:
        self._add(
            batches=1,
            records=sum(each.records for each in done) if self._leased_from is None else 0,
            parked=sum(each.parked for each in done),
            stopped={f"{each.topic}/{each.partition}": each.stopped for each in done},
        )
        metrics = self._book.metrics
        for each in done:
            metrics.count("pipeline_records", each.records, topic=each.topic, partition=each.partition)
            metrics.count("pipeline_parked", each.parked, topic=each.topic)
            metrics.time("pipeline_task", each.seconds)
        self._on_batch(number, done)

    def _add(self, *, records: int, parked: int, stopped: dict[str, str | None], batches: int = 0) -> None:
        """Add to the totals; a reason of None means that the partition is no longer stopped."""
        with self._lock:
            now = self._progress
            self._progress = msgspec.structs.replace(
                now,
                batches=now.batches + batches,
                records=now.records + records,
                parked=now.parked + parked,
                stopped={at: reason for at, reason in (now.stopped | stopped).items() if reason is not None},
            )

    def _watch(self, query: ReplicationQuery, configs: Mapping[str, TopicConfig], *, once: bool) -> bool:
        watch = StatusWatch(self, self._settings.look_every_s)
        try:
            while not self._stop.is_set():
                if query.has_ended(POLL_S if once else min(POLL_S * 5, self._settings.look_every_s)):
                    return once
                if watch.is_due():
                    self._record_batches(query)
                if watch.read_if_due() and watch.configs != configs and not once:
                    return False
            return True
        finally:
            query.close()
            self._record_batches(query)

    def _record_batches(self, query: ReplicationQuery) -> None:
        latest = query.record_batches()
        if latest is not None:
            batch_s = latest.duration_ms.get("triggerExecution", 0) / 1000
            with self._lock:
                self._progress = msgspec.structs.replace(
                    self._progress, records_per_s=latest.processed_rows_per_second, batch_s=batch_s
                )

    async def _read_status(self) -> tuple[dict[str, TopicConfig], Sequence[PartitionStatus]]:
        book = self._book
        configs = await self._without_other_logs(await topic_configs(book.store, self._topics))
        return configs, await partition_statuses(book.log, book.store, configs, now_ms=book.clock.now_ms())

    async def _without_other_logs(self, configs: dict[str, TopicConfig]) -> dict[str, TopicConfig]:
        """Return the topics that are in the configured log; mark the partitions of the other topics as stopped."""
        reasons = await find_other_logs(self._book.log, self._book.store, configs)
        stopped = {f"{topic}/{at}": why for topic, why in reasons.items() for at in range(configs[topic].partitions)}
        deleted = {at for at in self._progress.stopped if at.rpartition("/")[0] not in configs}
        resumed = dict.fromkeys(deleted | self._without_log - stopped.keys())
        self._without_log = set(stopped)
        self._add(records=0, parked=0, stopped={**resumed, **stopped})
        return {topic: config for topic, config in configs.items() if topic not in reasons}

    def read_status(self) -> dict[str, TopicConfig]:
        """Read and publish the partitions' status; return the configurations of the topics that can be replicated."""
        configs, statuses = self._portal.run(self._read_status())
        self._publish_status(statuses)
        return configs

    def _publish_status(self, found: Sequence[PartitionStatus], *, last: bool = False) -> None:
        with self._lock:
            self._progress = msgspec.structs.replace(self._progress, partitions=tuple(found))
            self._count_leased_records()
        metrics = self._book.metrics
        for each in found:
            metrics.gauge("pipeline_lag_records", each.lag, topic=each.topic, partition=each.partition)
            metrics.gauge("pipeline_lag_seconds", each.lag_s, topic=each.topic, partition=each.partition)
        progress = self.progress()
        metrics.gauge("pipeline_stopped_partitions", len(progress.stopped))
        self._report(progress)
        if last or time.monotonic() - self._status_written >= STATUS_EVERY_S:
            self._status_written = time.monotonic()
            own: dict[str, Any] = {"at_ms": self._book.clock.now_ms(), "engine": "spark", "process": this_process()}
            same = {name: getattr(progress, name) for name in JobStatus.__struct_fields__ if name not in own}
            try:
                self._portal.run(write_job_status(self._book.store, JobStatus(**own, **same)))
            except TidebookError as error:  # replication does not depend on the status
                metrics.count("pipeline_status_failures")
                LOGGER.warning("the status for 'tidebook pipeline status' could not be written: %s", error)

    def _count_leased_records(self) -> None:
        """While leases run, count the records that the pointers have passed since they began."""
        if self._leased_from is None:
            return
        before, records = self._leased_from
        for each in self._progress.partitions:
            records += max(0, each.replicated - before.setdefault((each.topic, each.partition), 0))
        now_s, counted = time.monotonic(), self._counted
        self._counted = (now_s, records)
        rate = 0.0 if counted is None else max(0.0, (records - counted[1]) / (now_s - counted[0]))
        self._progress = msgspec.structs.replace(self._progress, records=records, records_per_s=rate)
        self.metrics.gauge("pipeline_records_per_second", rate)
