"""`tidebook pipeline`: replicate, status, parked, purge-expired; other commands are in `pipeline_*` and `flush_wal`."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from typing import Annotated

import msgspec
import typer

from tidebook.cli import options, output, pipeline_checks, pipeline_export
from tidebook.cli.help import Group
from tidebook.cli.options import BookOption, JsonOption, MetricsOption, OnceOption, TopicsOption, run
from tidebook.cli.pipeline_progress import ProgressReporter
from tidebook.cli.pipeline_session import open_job_book, require_spark, session
from tidebook.cli.signals import stop_on_signals
from tidebook.cli.tags import format_horizon, horizon_row
from tidebook.core.errors import InvalidInput, NotFound, OutcomeUnknown, Unavailable
from tidebook.core.replication_plan import Parked
from tidebook.pipeline.errors import run_with_retries
from tidebook.pipeline.jars import kafka_source_jars
from tidebook.pipeline.jobs.purge import purge_expired
from tidebook.pipeline.parked import ReplayResult, replay_parked
from tidebook.pipeline.prometheus_text import serve_metrics
from tidebook.pipeline.submit import job as submitted_job
from tidebook.replication.status import (
    JobStatus,
    PartitionStatus,
    accept_losses,
    partition_statuses,
    read_job_status,
    topic_configs,
)
from tidebook.replication.ticks import has_tags
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

app = Group(help="Replicate, verify and export events with Spark.", no_args_is_help=True)

app.command()(pipeline_checks.verify)
app.command()(pipeline_checks.rebuild)
app.command()(pipeline_export.export)


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
    once: OnceOption = False,
    topic: TopicsOption = None,
    metrics: MetricsOption = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Skip records that the log has lost, and print their offsets.")
    ] = False,
    until_input_ends: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Replicate the log to the store, until Ctrl-C or SIGTERM.

    The first signal lets it finish the current batch; a second one exits immediately.
    """
    output.choose(json=json)
    require_spark()
    from tidebook.pipeline.jobs.replicate import FAILING_S
    from tidebook.pipeline.jobs.replicate import Progress as Replicated
    from tidebook.pipeline.jobs.replicate import Replication as Job

    stop = threading.Event()
    if until_input_ends:
        threading.Thread(target=_stop_at_end_of_input, args=(stop,), daemon=True).start()
    with stop_on_signals(stop.set), ProgressReporter() as reporter:

        def enter(each: Book, portal: BlockingPortal) -> None:
            run_with_retries(
                portal, each.__aenter__, stop=stop, within_s=FAILING_S if once else None,
                tell=lambda reason, waited_s: reporter(Replicated(0, 0, waited_s, (), waiting=reason)),
            )  # fmt: skip

        try:
            with open_job_book(book, enter=enter) as (each, portal), session(each, "replicate") as spark:
                if accept_loss:
                    for lost in portal.run(accept_losses(each.log, each.store, topic or ())):
                        text = f"{lost.topic}/{lost.partition}: {lost.first} to {lost.last} lost"
                        output.emit(msgspec.to_builtins(lost), text)
                with serve_metrics(each.metrics, metrics) if metrics is not None else nullcontext():
                    done = Job(spark, each, portal, topics=topic or (), tell=reporter, stop=stop).run(once=once)
                    reporter.finish(done)
                    if done.stopped:
                        raise typer.Exit(5)
        except (Unavailable, OutcomeUnknown):
            if not stop.is_set():  # after a stop request an unavailable server is no longer an error
                raise


def _stop_at_end_of_input(stop: threading.Event) -> None:
    """Set `stop` at the end of standard input, which is when the parent process has ended or asks to stop."""
    sys.stdin.read()
    stop.set()


@app.command()
def status(topic: TopicsOption = None, book: BookOption = None, json: JsonOption = False) -> None:
    """Print how far each partition is replicated."""

    async def go() -> None:
        async with options.open_book(book) as each:
            configs = await topic_configs(each.store, topic or ())
            for name in topic or ():
                if name not in configs:
                    raise NotFound(f"topic {name}: there is no such topic in the store")
            job_status, now_ms = await read_job_status(each.store), each.clock.now_ms()
            for found in await partition_statuses(each.log, each.store, configs, now_ms=now_ms):
                stopped = None if job_status is None else job_status.stopped.get(f"{found.topic}/{found.partition}")
                _show_status(found, stopped if found.lag else None)
            if await has_tags(each.store):
                horizon = await each.tags.horizon(configs)
                output.emit({"tags": horizon_row(horizon, now_ms)}, f"tags: {format_horizon(horizon, now_ms)}")
            parked_count = 0
            for name in configs:
                async for _ in each.store.parked(name):
                    parked_count += 1
            _show_job(job_status, parked_count, now_ms)

    run(go, json=json)


def _show_status(found: PartitionStatus, stopped: str | None) -> None:
    text = f"{found.topic}/{found.partition}: replicated to {found.replicated:,} of {found.end:,}"
    if found.lag:
        text += f", {found.lag:,} records and {found.lag_s:,.1f} s behind"
    if stopped is not None:
        text += f"; stopped: {stopped}"
    output.emit(msgspec.to_builtins(found) | {"stopped": stopped}, text)


def _show_job(job: JobStatus | None, parked_count: int, now_ms: int) -> None:
    row: dict[str, object] = {"parked": parked_count, "job": None if job is None else msgspec.to_builtins(job)}
    text = f"{parked_count:,} records are parked"
    if job is not None:
        text += (
            f"; the job last reported {(now_ms - job.at_ms) / 1000:,.0f} s ago: {job.records:,} records, "
            f"the latest batch with {job.records_per_s:,.0f}/s in {job.batch_s:.2f} s"
        )
    output.emit(row, text)


@app.command()
def parked(
    replay: Annotated[
        bool, typer.Option("--replay", help="Append the records' events to their journals, and remove the records.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="With --replay: use a record's raw bytes as the payload of one event.")
    ] = False,
    id: Annotated[
        str | None, typer.Option(metavar="ID", help="With --replay: the journal of records that name none.")
    ] = None,
    offset: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Use only the record at this offset; needs --topic.")
    ] = None,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """List records that cannot be read, or replay them."""
    if (raw or id is not None) and not replay:
        raise InvalidInput("--raw and --id need --replay")
    if offset is not None and not topic:
        raise InvalidInput("--offset needs --topic")
    left: list[ReplayResult] = []

    async def go() -> None:
        async with options.open_book(book) as each:
            names: list[str | None] = [*topic] if topic else [None]
            found = [one for name in names async for one in each.store.parked(name)]
            for one in found:
                if offset is not None and one.position.offset != offset:
                    continue
                if replay:
                    done = await replay_parked(each, one, raw=raw, id=id)
                    if done.error is not None:
                        left.append(done)
                    _show_replayed(done)
                else:
                    _show_parked(one)

    run(go, json=json)
    if left:
        raise typer.Exit(1)


def _show_parked(found: Parked) -> None:
    row = msgspec.to_builtins(found)
    row["value_bytes"] = len(found.value)
    at = f"{found.topic}/{found.partition} epoch {found.position.epoch} offset {found.position.offset}"
    output.emit(row, f"{at}: {found.reason}; {len(found.value):,} bytes")


def _show_replayed(done: ReplayResult) -> None:
    at = f"{done.topic}/{done.partition} offset {done.offset}"
    text = f"{at}: left, {done.error}" if done.error else f"{at}: replayed to {done.id}, {done.first} to {done.last}"
    output.emit(msgspec.to_builtins(done), text)


@app.command("purge-expired")
def purge(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print which journals have expired.")] = False,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Purge the journals that have expired."""

    async def go() -> None:
        total = purged = 0
        async with options.open_book(book) as each:
            async for found in purge_expired(each, topic or (), dry_run=dry_run):
                total, purged = total + 1, purged + found.purged
                state = "expired" if dry_run else "purged" if found.purged else "no longer expired"
                output.emit(msgspec.to_builtins(found), f"{found.topic}/{found.id}: {state}")
        output.emit({"expired": total, "purged": purged}, f"{total:,} expired, {purged:,} purged")

    run(go, json=json)
