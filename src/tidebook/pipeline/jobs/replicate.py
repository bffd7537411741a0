"""Replicate: from the log to the store, by the fold, as a Structured Streaming job.

The pointers in the store are the truth of what was replicated. A run begins from them with a checkpoint of its own,
so an old, a copied or a lost checkpoint means nothing.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tidebook.core.errors import OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.portal import Portal
from tidebook.core.topic import TopicFacts
from tidebook.pipeline.failures import failure_of, may_pass
from tidebook.pipeline.listening import Figures, Listener, listening
from tidebook.pipeline.losses import find_starts
from tidebook.pipeline.note import Note, leave_note
from tidebook.pipeline.session import local_uri, unless_spark_is_gone
from tidebook.pipeline.settings import PipelineSettings, pipeline_settings
from tidebook.pipeline.source.records import Offsets
from tidebook.pipeline.source.stream import on_few_cores, stream_records
from tidebook.pipeline.status import PartitionStatus, partition_statuses, topic_facts
from tidebook.pipeline.task import DONE, Done, replicate_task
from tidebook.pipeline.ticking import Ticks, records_before, replicate_through, send_ticks, ticking
from tidebook.pipeline.worker import OpenStore, open_settings_store
from tidebook.wiring.book import Book
from tidebook.wiring.settings import settings_to_json

LOGGER = logging.getLogger("tidebook.pipeline")
T = TypeVar("T")

#: How often, and for how long at least, a run that fails in the same place is started again before its error is told.
#: A busy machine may need more than the ten seconds that Spark gives a Python worker to start.
FAILURES_MAX = 5
FAILING_S = 120.0
RESTART_FIRST_S = 0.5
RESTART_MAX_S = 15.0
#: How long a stop waits for the batch under way.
STOP_S = 60.0
POLL_S = 0.1
#: The checkpoint is written beside the batches and not between them: nothing is ever read from it.
UNHURRIED = {"asyncProgressTrackingEnabled": "true", "_asyncProgressTrackingOverrideSinkSupportCheck": "true"}
#: How often a run leaves a note of itself in the store.
NOTE_EVERY_S = 5.0
#: So many looks in a row must fail before the query is ended that meanwhile does its work.
LOOKS_FAILED_MAX = 5
#: More records than this before the last ticks are left to another query: they would not fit the driver well.
DRIVER_RECORDS_MAX = 20_000


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


class Gate:
    """Lets the batches of a query in, one after the other, until it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = self._busy = False

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """False where the gate is closed: the batch is not to begin."""
        with self._changed:
            enters = self._busy = not self._closed
        try:
            yield enters
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def close(self, within_s: float) -> bool:
        """Let nothing more in, and wait for the batch within; False where it took longer."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not self._busy, within_s)


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
            if not self._stop.is_set():
                self._settle()
        return self.progress()

    def _settle(self) -> None:
        """Tick, and replicate through the ticks: what the run has brought comes below the horizon of streams by tag."""
        try:
            ticks = self._persevere(lambda: send_ticks(self._book, self._topics))
            going = {at: offset for at, offset in ticks.items() if f"{at[0]}/{at[1]}" not in self._stopped}
            if self._persevere(lambda: records_before(self._book, going)) > DRIVER_RECORDS_MAX:
                self._run(once=True)
            self._persevere(lambda: self._replicate_here(ticks))
            self._show(self._persevere(self._statuses), last=True)
        except (Unavailable, OutcomeUnknown):
            if not self._stop.is_set():  # who ends a run that waits for a server wants no other answer
                raise

    async def _replicate_here(self, ticks: Ticks) -> None:
        async for records in replicate_through(self._book, ticks):
            with self._lock:
                self._records += records
            if self._stop.is_set():
                return

    def _persevere(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something in this process, again where a server does not answer, as a query is."""
        began, wait_s = time.monotonic(), RESTART_FIRST_S
        while True:
            try:
                return self._portal.run(call())
            except (Unavailable, OutcomeUnknown) as error:
                if self._stop.is_set() or time.monotonic() - began >= FAILING_S:
                    raise
                self._tell(self.progress(waiting=str(error)))
                self._stop.wait(wait_s)
                wait_s = min(wait_s * 2, RESTART_MAX_S)

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
                    failures, wait_s, moved = 0, RESTART_FIRST_S, time.monotonic()
                failures += 1
                cause = self._cause(error)
                over = once and failures >= FAILURES_MAX and time.monotonic() - moved >= FAILING_S
                if over or not may_pass(cause):
                    if cause is error:
                        raise
                    raise cause from error
                self._tell(self.progress(waiting=str(cause)))
                self._stop.wait(wait_s)
                wait_s = min(wait_s * 2, RESTART_MAX_S)
        try:
            self._show(self._persevere(self._statuses), last=True)
        except (Unavailable, OutcomeUnknown):
            if not self._stop.is_set():  # who ends a run that waits for the store wants no other answer
                raise
        return self.progress()

    def _cause(self, error: TidebookError) -> TidebookError:
        """Where a query cannot go on: whether it is the log, which has lost records under it, and which ones."""
        if may_pass(error):
            return error
        try:
            self._portal.run(find_starts(self._book, self._facts()))
        except TidebookError as found:
            return found
        return error

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
            gate = Gate()
            query = self._start(facts, starts, self._checkpoint or scratch / "checkpoint", gate, once=once)
            return self._watch(query, gate, facts, once=once)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _start(
        self, facts: Mapping[str, TopicFacts], starts: Offsets, checkpoint: Path, gate: Gate, *, once: bool
    ) -> StreamingQuery:
        records = stream_records(self._spark, self._book.settings, starts, records_max=self._settings.records_max)
        task = replicate_task(
            settings_to_json(self._book.settings), dict(facts), wait_s=self._settings.wait_s, opening=self._opening
        )

        def each(batch: DataFrame, number: int) -> None:
            with gate.entered() as entered:
                if entered:
                    self._count(number, [Done(**row.asDict()) for row in batch.collect()])

        # The task belongs to the query: it is sent once, and collecting is all that is planned within a batch.
        done = on_few_cores(self._spark, records).mapInArrow(task, DONE)
        writer = done.writeStream.foreachBatch(each).option("checkpointLocation", local_uri(checkpoint))
        if once:
            return writer.trigger(availableNow=True).start()
        for name, value in UNHURRIED.items():
            writer = writer.option(name, value)
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

    def _watch(self, query: StreamingQuery, gate: Gate, facts: Mapping[str, TopicFacts], *, once: bool) -> bool:
        looked, failed = time.monotonic(), 0
        try:
            while not self._stop.is_set():
                if _ended(query, POLL_S if once else min(POLL_S * 5, self._settings.look_every_s)):
                    return once
                if time.monotonic() - looked < self._settings.look_every_s:
                    continue
                try:
                    now = self._facts()
                    self._look(now)
                except (Unavailable, OutcomeUnknown) as error:
                    failed += 1
                    if failed >= LOOKS_FAILED_MAX:
                        raise
                    self._book.metrics.count("pipeline_look_failures")
                    LOGGER.warning("the query runs on, and how far it is could not be told: %s", error)
                else:
                    failed = 0
                    if now != facts and not once:
                        return False
                looked = time.monotonic()
            return True
        finally:
            # The batch under way may finish, and those that Spark begins behind it do nothing.
            gate.close(STOP_S)
            with unless_spark_is_gone():
                query.stop()

    async def _statuses(self) -> Sequence[PartitionStatus]:
        return await partition_statuses(self._book, await topic_facts(self._book, self._topics))

    def _look(self, facts: Mapping[str, TopicFacts]) -> None:
        self._show(self._portal.run(partition_statuses(self._book, facts)))

    def _show(self, found: Sequence[PartitionStatus], *, last: bool = False) -> None:
        with self._lock:
            self._partitions = tuple(found)
        metrics = self._book.metrics
        for each in found:
            metrics.gauge("pipeline_lag_records", each.lag, topic=each.topic, partition=each.partition)
            metrics.gauge("pipeline_lag_seconds", each.lag_s, topic=each.topic, partition=each.partition)
        progress = self.progress()
        metrics.gauge("pipeline_stopped_partitions", len(progress.stopped))
        self._tell(progress)
        if last or time.monotonic() - self._noted >= NOTE_EVERY_S:
            self._noted = time.monotonic()
            try:
                self._portal.run(leave_note(self._book, self._note(progress)))
            except TidebookError as error:  # what it tells of does not depend on it
                metrics.count("pipeline_note_failures")
                LOGGER.warning("the note for 'tidebook pipeline status' could not be left: %s", error)

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
