"""Replicate: from the log to the store, by the fold, as a Structured Streaming job.

The pointers in the store are the truth of what was replicated. A run begins from them with a checkpoint of its own,
so an old, a copied or a lost checkpoint means nothing.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.core.portal import Portal
from tidebook.core.topic import TopicFacts
from tidebook.pipeline.failures import failure_of, may_pass
from tidebook.pipeline.listening import Figures, Listener, listening
from tidebook.pipeline.losses import find_starts
from tidebook.pipeline.note import Note, leave_note
from tidebook.pipeline.session import unless_spark_is_gone
from tidebook.pipeline.settings import PipelineSettings, pipeline_settings
from tidebook.pipeline.source.records import Offsets
from tidebook.pipeline.source.stream import stream_records
from tidebook.pipeline.status import PartitionStatus, partition_statuses, topic_facts
from tidebook.pipeline.task import DONE, Done, replicate_task
from tidebook.pipeline.ticking import settle, ticking
from tidebook.pipeline.worker import OpenStore, open_settings_store
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

#: How often, and for how long at least, a run that fails in the same place is started again before its error is told.
#: A busy machine may need more than the ten seconds that Spark gives a Python worker to start.
FAILURES_MAX = 5
FAILING_S = 120.0
RESTART_FIRST_S = 0.5
RESTART_MAX_S = 15.0
#: How long a stop waits for the batch under way.
STOP_S = 60.0
POLL_S = 0.1
#: How often a run leaves a note of itself in the store.
NOTE_EVERY_S = 5.0


class Progress(msgspec.Struct, frozen=True):
    """How a run stands."""

    batches: int
    records: int
    seconds: float
    partitions: tuple[PartitionStatus, ...]
    #: Why a partition no longer moves, by topic/partition.
    stopped: dict[str, str] = {}
    #: What the run is waiting for, if anything.
    waiting: str | None = None
    #: Records that were kept aside by this run.
    parked: int = 0
    #: Of the latest micro-batch.
    records_per_s: float = 0.0
    batch_s: float = 0.0

    @property
    def lag(self) -> int:
        """Records that are not replicated yet."""
        return sum(each.lag for each in self.partitions)


class Replication:
    """One run of the job. `run` blocks; `stop` may be called from anywhere."""

    def __init__(
        self,
        spark: SparkSession,
        book: Book,
        portal: Portal,
        *,
        topics: Sequence[str] = (),
        tell: Callable[[Progress], None] = lambda progress: None,
        on_batch: Callable[[int, Sequence[Done]], None] = lambda number, done: None,
        opening: OpenStore = open_settings_store,
        checkpoint: Path | None = None,
    ) -> None:
        self._spark = spark
        self._book = book
        self._portal = portal
        self._topics = tuple(topics)
        self._tell = tell
        self._on_batch = on_batch
        self._opening = opening
        self._checkpoint = checkpoint
        self._settings: PipelineSettings = pipeline_settings(book.settings)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._batches = self._records = self._parked = 0
        self._listener: Listener | None = None
        self._stopped: dict[str, str] = {}
        self._partitions: tuple[PartitionStatus, ...] = ()
        self._began = time.monotonic()
        self._noted = 0.0

    def stop(self) -> None:
        """End after the batch under way."""
        self._stop.set()

    def progress(self, waiting: str | None = None) -> Progress:
        """How the run stands."""
        figures = Figures() if self._listener is None else self._listener.figures
        with self._lock:
            return Progress(
                self._batches,
                self._records,
                time.monotonic() - self._began,
                self._partitions,
                dict(self._stopped),
                waiting,
                self._parked,
                figures.records_per_s,
                figures.batch_s,
            )

    def run(self, *, once: bool = False) -> Progress:
        """Replicate until all that the log held at the start is done, or until `stop`; streams by tag show it then."""
        with listening(self._spark, self._book.metrics) as self._listener:
            if not once:
                with ticking(self._book, self._portal, self._topics):
                    return self._run(once=False)
            self._run(once=True)
        ticks = self._portal.run(settle(self._book, self._topics))
        with self._lock:
            self._records += ticks
        self._look(self._facts(), last=True)
        return self.progress()

    def _run(self, *, once: bool) -> Progress:
        failures, wait_s = 0, RESTART_FIRST_S
        moved = time.monotonic()
        while not self._stop.is_set():
            before = self._records
            try:
                if self._run_query(once=once):
                    break
                failures, wait_s = 0, RESTART_FIRST_S
            except TidebookError as error:
                if self._stop.is_set():
                    break  # who asked for the end may have ended Spark as well
                if self._records > before:
                    failures, moved = 0, time.monotonic()
                failures += 1
                over = once and failures >= FAILURES_MAX and time.monotonic() - moved >= FAILING_S
                if over or not may_pass(error):
                    raise
                self._tell(self.progress(waiting=str(error)))
                self._stop.wait(wait_s)
                wait_s = min(wait_s * 2, RESTART_MAX_S)
        try:
            self._look(self._facts(), last=True)
        except Unavailable:
            if not self._stop.is_set():  # who ends a run that waits for the store wants no other answer
                raise
        return self.progress()

    def _facts(self) -> dict[str, TopicFacts]:
        return self._portal.run(topic_facts(self._book, self._topics))

    def _run_query(self, *, once: bool) -> bool:
        """One query, from the pointers; False where it ended because there is something new to begin from."""
        facts = self._facts()
        starts = self._portal.run(find_starts(self._book, facts))
        self._look(facts)
        if not facts:
            return once or self._stop.wait(self._settings.look_every_s)
        scratch = Path(tempfile.mkdtemp(prefix="tidebook-replicate-"))
        try:
            query = self._start(facts, starts, self._checkpoint or scratch / "checkpoint", once=once)
            return self._watch(query, facts, once=once)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _start(
        self, facts: Mapping[str, TopicFacts], starts: Offsets, checkpoint: Path, *, once: bool
    ) -> StreamingQuery:
        records = stream_records(self._spark, self._book.settings, starts, records_max=self._settings.records_max)
        task = replicate_task(
            settings_to_json(self._book.settings), dict(facts), wait_s=self._settings.wait_s, opening=self._opening
        )

        def each(batch: DataFrame, number: int) -> None:
            rows = batch.mapInArrow(task, DONE).collect()
            self._count(number, [Done(**row.asDict()) for row in rows])

        writer = records.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint))
        if once:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{self._settings.trigger_s} seconds").start()

    def _count(self, number: int, done: Sequence[Done]) -> None:
        with self._lock:
            self._batches += 1
            self._records += sum(each.records for each in done)
            self._parked += sum(each.parked for each in done)
            for each in done:
                at = f"{each.topic}/{each.partition}"
                if each.stopped is not None:
                    self._stopped[at] = each.stopped
        metrics = self._book.metrics
        for each in done:
            metrics.count("pipeline_records", each.records, topic=each.topic, partition=each.partition)
            metrics.count("pipeline_parked", each.parked, topic=each.topic)
            metrics.time("pipeline_task", each.seconds)
        self._on_batch(number, done)

    def _watch(self, query: StreamingQuery, facts: Mapping[str, TopicFacts], *, once: bool) -> bool:
        looked = time.monotonic()
        try:
            while not self._stop.is_set():
                if _ended(query, POLL_S if once else min(POLL_S * 5, self._settings.look_every_s)):
                    return once
                if time.monotonic() - looked >= self._settings.look_every_s:
                    now = self._facts()
                    self._look(now)
                    if now != facts and not once:
                        return False
                    looked = time.monotonic()
            return True
        finally:
            _finish(query)

    def _look(self, facts: Mapping[str, TopicFacts], *, last: bool = False) -> None:
        found = tuple(self._portal.run(partition_statuses(self._book, facts)))
        with self._lock:
            self._partitions = found
        metrics = self._book.metrics
        for each in found:
            metrics.gauge("pipeline_lag_records", each.lag, topic=each.topic, partition=each.partition)
            metrics.gauge("pipeline_lag_seconds", each.lag_s, topic=each.topic, partition=each.partition)
        progress = self.progress()
        metrics.gauge("pipeline_stopped_partitions", len(progress.stopped))
        self._tell(progress)
        if last or time.monotonic() - self._noted >= NOTE_EVERY_S:
            self._noted = time.monotonic()
            self._portal.run(leave_note(self._book, self._note(progress)))

    def _note(self, progress: Progress) -> Note:
        return Note(
            self._book.clock.now_ms(),
            progress.batches,
            progress.records,
            progress.parked,
            progress.records_per_s,
            progress.batch_s,
            progress.stopped,
        )


def _ended(query: StreamingQuery, within_s: float) -> bool:
    """Whether the query has ended by itself; its failure is raised as what caused it."""
    try:
        return bool(query.awaitTermination(within_s))  # type: ignore[arg-type]
    except TidebookError:
        raise
    except Exception as error:
        raise failure_of(error) from error


def _finish(query: StreamingQuery) -> None:
    """Let the batch under way finish, then stop."""
    deadline = time.monotonic() + STOP_S
    with unless_spark_is_gone():
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
            time.sleep(POLL_S)
        query.stop()
