"""`tidebook pipeline`: replicate, status, parked, purge-expired; the other commands stand beside this module."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

import tidebook
from tidebook.cli import output, pipeline_checks, pipeline_export
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.cli.pipeline_progress import ProgressShown
from tidebook.cli.pipeline_session import TopicsOption, opened, session
from tidebook.cli.tags import horizon_row, shown_horizon
from tidebook.core.errors import NotFound
from tidebook.core.replication import Parked
from tidebook.pipeline.exposition import serving
from tidebook.pipeline.jars import kafka_source_jars
from tidebook.pipeline.jobs.purge import purge_expired
from tidebook.pipeline.losses import accept_losses
from tidebook.pipeline.note import Note, read_note
from tidebook.pipeline.parked import Replayed, replay_parked
from tidebook.pipeline.status import PartitionStatus, partition_statuses, topic_facts
from tidebook.pipeline.submit import job as submitted_job
from tidebook.tags.ticks import has_tags

if TYPE_CHECKING:
    from tidebook.pipeline.jobs.replicate import Replication

app = typer.Typer(help="The data pipeline, on Spark: from the log to the store, and out of it.", no_args_is_help=True)

app.command()(pipeline_checks.verify)
app.command()(pipeline_checks.rebuild)
app.command()(pipeline_export.export)


@app.command()
def script() -> None:
    """Print the script for `spark-submit "$(tidebook pipeline script)" pipeline replicate …`."""
    print(submitted_job.__file__)


@app.command()
def jars() -> None:
    """Print the jars of Spark's Kafka source, for `spark-submit --jars "$(tidebook pipeline jars)"`."""
    print(",".join(map(str, kafka_source_jars())))


@app.command()
def replicate(
    once: Annotated[bool, typer.Option("--once", help="End when all that the log holds now is in the store.")] = False,
    topic: TopicsOption = None,
    metrics: Annotated[
        str | None, typer.Option(help="Serve /metrics for Prometheus there.", metavar="HOST:PORT")
    ] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on behind records that the log has lost, and print which.")
    ] = False,
    until_input_ends: Annotated[bool, typer.Option(hidden=True)] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Replicate the log to the store, until Ctrl-C or SIGTERM, or until it is done with --once."""
    output.choose(json=json)
    with opened(book) as (each, portal), session(each, "replicate") as spark:
        from tidebook.pipeline.jobs.replicate import Replication as Job

        if accept_loss:
            for lost in portal.run(accept_losses(each, topic or ())):
                output.emit(
                    msgspec.to_builtins(lost), f"{lost.topic}/{lost.partition}: {lost.first} to {lost.last} lost"
                )
        served = serving(each.metrics, metrics) if metrics is not None else nullcontext()
        with ProgressShown() as shown, served:
            job = Job(spark, each, portal, topics=topic or (), tell=shown)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: job.stop())
            if until_input_ends:
                threading.Thread(target=_stop_at_end_of_input, args=(job,), daemon=True).start()
            done = job.run(once=once)
            shown.finish(done)
    if done.stopped:
        raise typer.Exit(5)


def _stop_at_end_of_input(job: Replication) -> None:
    """Whoever started this process is gone: nobody would stop it."""
    sys.stdin.read()
    job.stop()


@app.command()
def status(topic: TopicsOption = None, book: BookOption = None, json: JsonOption = False) -> None:
    """Show how far partitions are replicated, which one holds streams by tag, the running job, and what is parked."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as each:
            facts = await topic_facts(each, tuple(topic or ()))
            for name in topic or ():
                if name not in facts:
                    raise NotFound(f"topic {name}: the store has nothing of it")
            note = await read_note(each)
            for found in await partition_statuses(each, facts):
                stopped = None if note is None else note.stopped.get(f"{found.topic}/{found.partition}")
                _show_status(found, stopped if found.lag else None)
            if await has_tags(each.store):
                horizon, now_ms = await each.tags.horizon(facts), each.clock.now_ms()
                output.emit({"tags": horizon_row(horizon, now_ms)}, f"tags: {shown_horizon(horizon, now_ms)}")
            kept_aside = 0
            for name in facts:
                async for _ in each.store.parked(name):
                    kept_aside += 1
            _show_job(note, kept_aside, each.clock.now_ms())

    run(go, json=json)


def _show_status(found: PartitionStatus, stopped: str | None) -> None:
    text = f"{found.topic}/{found.partition}: replicated to {found.replicated:,} of {found.end:,}"
    if found.lag:
        text += f", {found.lag:,} records and {found.lag_s:,.1f} s behind"
    if stopped is not None:
        text += f"; stopped: {stopped}"
    output.emit(msgspec.to_builtins(found) | {"stopped": stopped}, text)


def _show_job(note: Note | None, kept_aside: int, now_ms: int) -> None:
    row: dict[str, object] = {"parked": kept_aside, "job": None if note is None else msgspec.to_builtins(note)}
    text = f"{kept_aside:,} records are parked"
    if note is not None:
        text += (
            f"; the job was seen {(now_ms - note.at_ms) / 1000:,.0f} s ago: {note.records:,} records, the latest batch "
            f"with {note.records_per_s:,.0f}/s in {note.batch_s:.2f} s"
        )
    output.emit(row, text)


@app.command()
def parked(
    replay: Annotated[
        bool, typer.Option("--replay", help="Append what the records hold to their journals, and forget them.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="With --replay: take a record's bytes as they are for one event's payload.")
    ] = False,
    id: Annotated[str | None, typer.Option(help="With --replay: the journal, where the record names none.")] = None,
    offset: Annotated[int | None, typer.Option(help="The record at this offset alone; give --topic too.")] = None,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """List the records that are void because nobody can read them, with the reason, or replay them."""
    left: list[Replayed] = []

    async def go() -> None:
        async with tidebook.open(chosen(book)) as each:
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


def _show_replayed(done: Replayed) -> None:
    at = f"{done.topic}/{done.partition} offset {done.offset}"
    text = f"{at}: left, {done.error}" if done.error else f"{at}: replayed to {done.id}, {done.first} to {done.last}"
    output.emit(msgspec.to_builtins(done), text)


@app.command("purge-expired")
def purge(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell which journals have expired.")] = False,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Purge the journals whose expiry has passed; one that was appended to since stays."""

    async def go() -> None:
        total = purged = 0
        async with tidebook.open(chosen(book)) as each:
            async for found in purge_expired(each, topic or (), dry_run=dry_run):
                total, purged = total + 1, purged + found.purged
                state = "expired" if dry_run else "purged" if found.purged else "moved on since"
                output.emit(msgspec.to_builtins(found), f"{found.topic}/{found.id}: {state}")
        output.emit({"expired": total, "purged": purged}, f"{total:,} expired, {purged:,} purged")

    run(go, json=json)
