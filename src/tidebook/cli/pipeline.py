"""`tidebook pipeline`: replicate, status, parked, purge-expired, verify, rebuild, export, flush-wal, script, jars."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.command import Group, run, stop_loop_on_signals, stop_on_signals
from tidebook.cli.options import (
    BookOption,
    LogJsonOption,
    MetricsOption,
    OnceOption,
    TopicArgument,
    TopicsOption,
    argument,
    book_settings,
    flag,
    number,
    open_book,
    option,
    seconds,
)
from tidebook.cli.tags import describe_horizon
from tidebook.cli.topics import require_topics
from tidebook.cli.wal import Namespace
from tidebook.core.errors import InvalidInput, OutcomeUnknown, Unavailable
from tidebook.pipeline.errors import failure_of, run_with_retries
from tidebook.pipeline.jars import delta_jars, kafka_source_jars, missing_for_spark
from tidebook.pipeline.jobs.purge import purge_expired
from tidebook.pipeline.parked import replay_parked
from tidebook.pipeline.session import (
    choose_engine,
    ignore_spark_exit,
    job_context,
    job_session,
    pipeline_settings,
    submitted,
)
from tidebook.pipeline.submit import job as submitted_job
from tidebook.pipeline.task_progress import SPARK_SETTINGS, TaskProgress, report_tasks
from tidebook.replication.inline import InlineStatus, replicate_to_end
from tidebook.replication.status import (
    Engine,
    LostOffsets,
    accept_losses,
    partition_statuses,
    read_job_status,
    topic_configs,
)
from tidebook.replication.ticks import has_tags
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.json_log import log_as_json
from tidebook.runtime.metrics import serve_metrics
from tidebook.wal.record import ID_MAX
from tidebook.wiring.book import Book
from tidebook.wiring.replication import inline_replication, require_embedded
from tidebook.wiring.settings import Settings
from tidebook.wiring.spark import clears_tags

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidebook.pipeline.jobs.export import ExportProgress
    from tidebook.pipeline.jobs.replicate import Progress as Replicated
    from tidebook.pipeline.jobs.verify import VerifyResult
    from tidebook.replication.journal_state import Difference
    from tidebook.wal.flush import Flushed

T = TypeVar("T")
ProgressOption = Annotated[
    bool, typer.Option("--progress", help="Also print how many Spark tasks are done, at most once a second.")
]
MASTERS = re.compile(r"local$|local\[|local-cluster\[|spark://|yarn$|k8s://")
DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}

#: The interval at which an inline replication prints its progress, if it has changed.
INLINE_REPORT_S = 1.0


class EngineChoice(StrEnum):
    """The values of `--engine`."""

    INLINE = "inline"
    SPARK = "spark"


app = Group(help="Replicate, verify and export events.", no_args_is_help=True)


def _enter(book: Book, portal: BlockingPortal) -> None:
    portal.run(book.__aenter__())


@contextmanager
def _open_job(
    book: str | None, job: str, *, delta: bool = False, progress: bool = False
) -> Iterator[tuple[SparkSession, Book, BlockingPortal]]:
    """Open an existing book and a Spark session for a job; with `progress`, print the progress of Spark's tasks."""
    more = dict(SPARK_SETTINGS) if progress else {}
    if delta:
        more |= DELTA if submitted() else {**DELTA, "spark.jars": ",".join(map(str, delta_jars()))}
    with (
        _open_with(book, lambda settings: job_session(f"tidebook {job}", settings, more)) as opened,
        report_tasks(opened[0], _show_progress) if progress else nullcontext(),
    ):
        yield opened


def _show_progress(found: TaskProgress) -> None:
    output.emit({"progress": found}, f"{found.done:,} of {found.tasks:,} tasks are done")


@contextmanager
def _open_with(
    book: str | None, new: Callable[[Settings], T], enter: Callable[[Book, BlockingPortal], None] = _enter
) -> Iterator[tuple[T, Book, BlockingPortal]]:
    """Open an existing book, and start Spark with `new`; the job runs in threads and calls the book through the portal.

    `enter` opens the book; it may wait for the book's servers.
    """
    settings = book_settings(book)
    portal = BlockingPortal()
    try:
        with _starting(settings, new) as starting:
            opened = Book(settings)
            enter(opened, portal)
            try:
                yield starting.result(), opened, portal
            finally:
                portal.run(opened.__aexit__(None, None, None))
    finally:
        portal.close()


@contextmanager
def _starting(settings: Settings, new: Callable[[Settings], T]) -> Iterator[Future[T]]:
    """Start Spark in a thread while the caller opens the book; translate the errors of the start and of the job."""
    master = pipeline_settings(settings).master
    if not MASTERS.match(master):  # otherwise Spark's launcher prints a long Java stack trace
        raise InvalidInput(f"[pipeline] master must be local[N], spark://HOST:PORT, yarn or k8s://URL, not {master!r}")
    if (missing := missing_for_spark()) is not None:
        raise InvalidInput(missing)
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    starting: Future[T] = Future()

    def start() -> None:
        try:
            starting.set_result(new(settings))
        except (PySparkException, Py4JError) as error:
            reason = f"Spark does not start: {_cause(error)}: check [pipeline] in tidebook.toml"
            starting.set_exception(InvalidInput(reason))
        except BaseException as error:
            starting.set_exception(error)

    threading.Thread(target=start, daemon=True).start()
    try:
        yield starting
    except (PySparkException, Py4JError) as error:
        raise failure_of(error) from error
    finally:
        if waits_for_spark_to_stop(settings):
            starting.add_done_callback(_stop)  # Spark still starts if opening the book failed


def waits_for_spark_to_stop(settings: Settings) -> bool:
    """Return whether a job's command stops Spark before it exits.

    On a cluster it must: the cluster would report the application as failed. A local Java ends after the command: it
    notices the end of its input, and its shutdown hooks stop Spark and delete its files, which takes about a second.
    """
    return submitted() or not pipeline_settings(settings).master.startswith("local")


def _stop(started: Future[Any]) -> None:
    if started.exception() is None:
        with ignore_spark_exit():
            started.result().stop()


def _cause(error: Exception) -> str:
    """Return the innermost cause of a Java exception, or the last line of another error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("Caused by:", ": ", "org.", "java."))]
    return (causes or lines or [type(error).__name__])[-1].removeprefix("Caused by:").strip(" :")[:300]


@app.command(check=True)
def verify(
    book: BookOption,
    topics: list[str] | None = argument("TOPIC", "The topics; by default all topics.", None),
    repair: bool = flag("--repair", "Repair the store from the log."),
    topic: TopicsOption = None,
    progress: ProgressOption = False,
) -> None:
    """Compare the store with the log.

    Exit with code 1 if differences remain that were not repaired.
    """
    with _open_job(book, "verify", progress=progress) as (spark, opened, portal):
        from tidebook.pipeline.jobs.verify import verify as job

        named = tuple(dict.fromkeys([*(topics or ()), *(topic or ())]))
        done = job(spark, opened, portal, named, repair=repair, report=_show_difference)
    _finish_comparison(done)


@app.command(check=True)
def rebuild(
    book: BookOption,
    topic: TopicArgument,
    tags: bool = flag("--tags", "Rebuild only the tag views, from the journals in the store."),
    progress: ProgressOption = False,
) -> None:
    """Rebuild a topic in the store from its whole log.

    Fail if the log no longer contains the first record.
    """
    with _open_job(book, "rebuild", progress=progress) as (spark, opened, portal):
        from tidebook.pipeline.jobs.rebuild import rebuild as job
        from tidebook.pipeline.jobs.rebuild import rebuild_tags

        if tags:
            tagged = rebuild_tags(spark, opened, portal, topic)
            row = {"topic": topic, "tag_rows": tagged.written, "removed": tagged.removed}
            output.emit(row, f"{topic}: {tagged.written:,} tag rows written, {tagged.removed:,} removed")
            return
        done = job(spark, opened, portal, topic, report=_show_difference)
    _finish_comparison(done)


def _show_difference(found: Difference) -> None:
    at = f"{found.topic}/{found.id}" + ("" if found.seq_nr is None else f" {found.seq_nr}")
    details = [f"expected {found.expected}" if found.expected else "", f"found {found.found}" if found.found else ""]
    output.emit(found, f"{at}: {found.what}; {', '.join(filter(None, details))}")


def _finish_comparison(done: VerifyResult) -> None:
    differing = sum(done.differences.values())
    text = f"{done.journals:,} journals with {done.events:,} events compared, {differing:,} differences"
    if differing:
        text += f", {done.repaired:,} repaired, {done.left:,} left"
    if done.partial:
        topics = ", ".join(done.partial)
        text += f"; the log of {topics} no longer contains its first records: earlier events were not compared"
    output.emit(done, text)
    if done.left:
        raise typer.Exit(1)


@app.command()
def export(
    book: BookOption,
    to: str = option(
        "FOLDER", "A folder that all Spark workers can reach, or the folder of a Delta table.", default=...
    ),
    delta: bool = flag("--delta", "Write a Delta table instead of Parquet files."),
    every_s: float | None = seconds("Repeat the export at this interval, until SIGINT or SIGTERM.", least=0.05),
    topic: TopicsOption = None,
    progress: ProgressOption = False,
) -> None:
    """Export new events by topic and day, exactly once."""
    stop = threading.Event()
    with _open_job(book, "export", delta=delta, progress=progress) as (spark, opened, portal):
        from tidebook.pipeline.jobs.export import export as job

        def report(done: ExportProgress) -> None:
            if output.human():
                output.note(f"{done.events:,} events in {done.batches:,} batches, {done.seconds:.1f} s")

        if every_s is None:  # a repeated export may start before the topic exists
            portal.run(require_topics(opened, topic))
        table_format = "delta" if delta else "parquet"
        with stop_on_signals(stop.set):
            while True:
                done = job(spark, opened, portal, to, topics=topic or (), table_format=table_format, report=report)
                output.emit(done, f"{done.events:,} events exported to {to}")
                if every_s is None or stop.wait(every_s):
                    return


@app.command()
def script() -> None:
    """Print the path of the script for spark-submit.

    For example: spark-submit "$(tidebook pipeline script)" pipeline replicate
    """
    output.write(f"{submitted_job.__file__}\n")


@app.command()
def jars() -> None:
    """Print the jars of Spark's Kafka source.

    For example: spark-submit --jars "$(tidebook pipeline jars)" "$(tidebook pipeline script)" pipeline replicate
    """
    output.write(",".join(map(str, kafka_source_jars())) + "\n")


@app.command()
def replicate(
    book: BookOption,
    once: OnceOption = False,
    topic: TopicsOption = None,
    metrics: MetricsOption = None,
    accept_loss: bool = flag("--accept-loss", "Skip records that the log has lost, and print their offsets."),
    engine: EngineChoice | None = option(
        "inline|spark", "inline: in this process, the default of an embedded book; spark: the default with servers."
    ),
    until_input_ends: bool = typer.Option(False, "--until-input-ends", hidden=True),
    log_json: LogJsonOption = False,
) -> None:
    """Replicate the log to the store, until Ctrl-C or SIGTERM.

    The first signal lets it finish the current batch; a second one exits immediately.
    """
    if log_json:
        log_as_json()
    if _engine_of(book_settings(book), engine) == "inline":
        run(_replicate_inline(book, topic or (), once=once, metrics=metrics, accept_loss=accept_loss))
        return
    stop = threading.Event()
    reporter = ProgressReporter()
    if until_input_ends:
        threading.Thread(target=_stop_at_end_of_input, args=(stop,), daemon=True).start()

    def enter(opened: Book, portal: BlockingPortal) -> None:
        # Imported only here, because Java starts at the same time.
        from tidebook.pipeline.jobs.replicate import FAILING_S
        from tidebook.pipeline.jobs.replicate import Progress as Replicated

        def report(reason: str, waited_s: float) -> None:
            reporter(Replicated(0, 0, waited_s, (), waiting=reason))

        run_with_retries(portal, opened.__aenter__, stop=stop, within_s=FAILING_S if once else None, report=report)

    with stop_on_signals(stop.set), reporter.bar:
        try:
            with _open_with(book, partial(job_context, "tidebook replicate"), enter) as (spark, opened, portal):
                from tidebook.pipeline.jobs.replicate import Replication

                if accept_loss:
                    _show_lost(portal.run(accept_losses(opened.log, opened.store, topic or ())))
                job = Replication(spark, opened, portal, topics=topic or (), report=reporter, stop=stop)
                with serve_metrics(opened.metrics, metrics) if metrics is not None else nullcontext():
                    done = job.run(once=once)
                    reporter.finish(done)
                    if done.stopped:
                        raise typer.Exit(5)
        except (Unavailable, OutcomeUnknown):
            if not stop.is_set():  # after a stop request an unavailable server is no longer an error
                raise


def _engine_of(settings: Settings, chosen: EngineChoice | None) -> Engine:
    """Return the engine that was chosen, else Spark if `spark-submit` started this process, else that of the book."""
    if chosen is None:
        return "spark" if submitted() else choose_engine(settings)
    if chosen == EngineChoice.INLINE:
        require_embedded(settings, "the engine 'inline'")
    return chosen.value


async def _replicate_inline(
    book: str | None, topics: Sequence[str], *, once: bool, metrics: str | None, accept_loss: bool
) -> None:
    async with open_book(book) as opened:
        if once:  # otherwise the topic may be created later
            await require_topics(opened, topics)
        if accept_loss:
            _show_lost(await accept_losses(opened.log, opened.store, topics))
        stop = asyncio.Event()
        with (
            serve_metrics(opened.metrics, metrics) if metrics is not None else nullcontext(),
            stop_loop_on_signals(stop.set),
        ):
            done = await (_replicate_once(stop, opened, topics) if once else _replicate_until(stop, opened, topics))
        output.emit({"done": True, **done.as_row()}, f"{done.records:,} records replicated, {done.parked:,} parked")
    if done.stopped:
        raise typer.Exit(5)


async def _replicate_once(stop: asyncio.Event, book: Book, topics: Sequence[str]) -> InlineStatus:
    """Replicate what the log has now, and show a bar on a terminal; at `stop` end at once, as in a crash."""
    clear_tags = clears_tags(book.settings)
    job = asyncio.create_task(replicate_to_end(book.log, book.store, topics, clear_tags=clear_tags))
    stopping = asyncio.create_task(stop.wait())
    with output.progress_bar() as bar:
        task, total = bar.add_task("replicated", total=None), 0
        while not job.done() and not stop.is_set():
            if not bar.disable:
                waiting = await _unreplicated(book, topics)
                total = max(total, waiting)
                bar.update(task, total=total, completed=total - waiting)
            await asyncio.wait([job, stopping], timeout=INLINE_REPORT_S, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not job.done():
        job.cancel()
        with suppress(asyncio.CancelledError):
            await job
        return InlineStatus(state="closed")
    done = job.result()
    return InlineStatus(
        state="closed", batches=done.batches, records=done.records, parked=done.parked, stopped=done.stopped
    )


async def _unreplicated(book: Book, topics: Sequence[str]) -> int:
    configs = await topic_configs(book.store, topics)
    return sum(each.lag for each in await partition_statuses(book.log, book.store, configs, now_ms=book.clock.now_ms()))


async def _replicate_until(stop: asyncio.Event, book: Book, topics: Sequence[str]) -> InlineStatus:
    replication = inline_replication(
        book.settings, book.log, book.store, clock=book.clock, metrics=book.metrics, topics=topics
    )
    replication.start()
    shown: dict[str, Any] | None = None
    while not stop.is_set():
        row = replication.status().as_row()
        if row != shown:  # print nothing while nothing happens
            shown = row
            output.emit({"done": False, **row}, replication.status().describe())
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), INLINE_REPORT_S)
    await replication.close()
    return replication.status()


def _show_lost(found: Sequence[LostOffsets]) -> None:
    for lost in found:
        output.emit(lost, f"{lost.topic}/{lost.partition}: {lost.first} to {lost.last} lost")


def _stop_at_end_of_input(stop: threading.Event) -> None:
    """Set `stop` at the end of standard input, when the parent process has ended or asks to stop."""
    sys.stdin.read()
    stop.set()


class ProgressReporter:
    """Prints the progress of a replication; reports each stopped partition and each wait only once.

    On a terminal it is a bar, in a pipe one JSON object per line.
    """

    def __init__(self) -> None:
        self.bar = output.progress_bar()
        self._task = self.bar.add_task("replicated")
        self._reported: set[str] = set()
        self._last: bytes = b""

    def __call__(self, progress: Replicated) -> None:
        for at, reason in progress.stopped.items():
            self._warn_once(f"{at} is stopped: {reason}")
        if progress.waiting is not None:
            self._warn_once(f"waiting: {progress.waiting}")
        total = sum(each.end - each.start for each in progress.partitions)
        self.bar.update(self._task, total=total, completed=total - progress.lag)
        if not output.human():
            self._emit(progress, done=False)

    def finish(self, progress: Replicated) -> None:
        """Print the final totals."""
        if output.human():
            output.emit({}, f"{progress.records:,} records in {progress.batches:,} batches, {progress.lag:,} remaining")
        else:
            self._last = b""
            self._emit(progress, done=True)

    def _emit(self, progress: Replicated, *, done: bool) -> None:
        names = ("batches", "records", "lag", "parked", "batch_s", "stopped", "waiting", "partitions")
        row = {name: getattr(progress, name) for name in names}
        row["records_per_s"] = round(progress.records_per_s, 1)
        encoded = msgspec.json.encode(row)
        if encoded != self._last:  # print nothing while the pipeline is idle
            self._last = encoded
            output.emit({"done": done, "seconds": round(progress.seconds, 3), **row})

    def _warn_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            output.note(f"tidebook: {text}")


@app.command()
async def status(book: Book, topic: TopicsOption = None) -> None:
    """Print how far each partition is replicated."""
    await require_topics(book, topic)
    configs = await topic_configs(book.store, topic or ())
    job, now_ms = await read_job_status(book.store), book.clock.now_ms()
    table = output.Table("topic", "partition", "replicated", "end", "lag", "age", "stopped")
    for found in await partition_statuses(book.log, book.store, configs, now_ms=now_ms):
        stopped = None if job is None or not found.lag else job.stopped.get(f"{found.topic}/{found.partition}")
        age = f"{found.lag_s:,.1f} s" if found.lag else None
        offsets = found.replicated, found.end, found.lag
        table.add(found, found.topic, str(found.partition), *offsets, age, stopped, stopped=stopped)
    table.print("no topics")
    if await has_tags(book.store):
        row, text = describe_horizon(await book.tags.horizon(configs), now_ms)
        output.emit({"tags": row}, text)
    parked_count = sum([1 for name in configs async for _ in book.store.parked(name)])
    text = f"{parked_count:,} records are parked"
    if job is not None:
        by = job.engine if job.process is None else f"{job.engine}, {job.process}"
        text += (
            f"; the job ({by}) last reported {(now_ms - job.at_ms) / 1000:,.0f} s ago: {job.records:,} records, "
            f"the latest batch with {job.records_per_s:,.0f}/s in {job.batch_s:.2f} s"
        )
    output.emit({"parked": parked_count, "job": job}, text)


@app.command()
async def parked(
    book: BookOption,
    replay: bool = flag("--replay", "Append the records' events to their journals, and remove the records."),
    raw: bool = flag("--raw", "With --replay: use a record's raw bytes as the payload of one event."),
    id: str | None = option("ID", "With --replay: the journal for records without a valid journal id."),
    offset: int | None = number("Use only the record at this offset; needs --topic.", 0, None),
    topic: TopicsOption = None,
) -> None:
    """List records that cannot be read, or replay them."""
    if (raw or id is not None) and not replay:
        raise InvalidInput("--raw and --id need --replay")
    if offset is not None and not topic:
        raise InvalidInput("--offset needs --topic")
    left = 0
    table = output.Table("topic", "partition", "epoch", "offset", "bytes", "reason")
    async with open_book(book) as opened:
        await require_topics(opened, topic)
        names: list[str | None] = [*topic] if topic else [None]
        for found in [one for name in names async for one in opened.store.parked(name)]:
            if offset is not None and found.position.offset != offset:
                continue
            if replay:
                done = await replay_parked(opened, found, raw=raw, id=id)
                left += done.error is not None
                result = f"left, {done.error}" if done.error else f"replayed to {done.id}, {done.first} to {done.last}"
                output.emit(done, f"{done.topic}/{done.partition} offset {done.offset}: {result}")
                continue
            position, size_bytes = (found.position.epoch, found.position.offset), len(found.value)
            cells = (found.topic, str(found.partition), *map(str, position), size_bytes, found.reason)
            table.add(found, *cells, value_bytes=size_bytes)
    if not replay:
        table.print("no parked records")
    if left:
        raise typer.Exit(1)


@app.command("purge-expired")
async def purge(
    book: Book,
    dry_run: bool = flag("--dry-run", "Only print which journals have expired."),
    topic: TopicsOption = None,
) -> None:
    """Purge the journals that have expired."""
    await require_topics(book, topic)
    total = purged = 0
    async for found in purge_expired(book, topic or (), dry_run=dry_run):
        total, purged = total + 1, purged + found.purged
        state = "expired" if dry_run else "purged" if found.purged else "no longer expired"
        output.emit(found, f"{found.topic}/{found.id}: {state}")
    output.emit({"expired": total, "purged": purged}, f"{total:,} expired, {purged:,} purged")


@app.command()
def flush_wal(
    book: BookOption,
    namespace: Namespace,
    to: str = option("FOLDER", "The folder for the Parquet files.", default=...),
    region: list[int] | None = number("Flush only this region; may be repeated.", 0, ID_MAX, metavar="REGION"),
) -> None:
    """Move the entries of regions to Parquet, exactly once."""
    with _open_job(book, "flush-wal") as (spark, opened, portal):
        from tidebook.pipeline.jobs.flush_wal import flush_wal as job

        def report(done: Flushed) -> None:
            row = {"region": done.region, "entries": done.entries, "ranges": done.ranges}
            output.emit(row, f"region {done.region}: {done.entries:,} entries of {len(done.ranges)} tables")

        job(spark, opened, portal, namespace=namespace, output=to, regions=region or (), report=report)
