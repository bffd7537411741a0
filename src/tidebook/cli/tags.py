"""`tidebook tags`: read a stream by tag, list the tags, tell how complete they are, make one anew."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, cast

import msgspec
import typer

import tidebook
from tidebook.cli import output
from tidebook.cli.journal import shown_payload
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.core.errors import InvalidInput
from tidebook.tags.event import TaggedEvent
from tidebook.tags.horizon import Horizon
from tidebook.tags.settings import Consistency

app = typer.Typer(help="Streams of events by tag, across journals.", no_args_is_help=True)


def tagged_row(event: TaggedEvent) -> dict[str, Any]:
    """An event as a line of JSON."""
    return {
        "topic": event.topic,
        "id": event.id,
        "seq_nr": event.seq_nr,
        "tag_seq_nr": event.tag_seq_nr,
        "payload": shown_payload(event.payload),
        "tags": sorted(event.tags),
        "metadata": event.metadata,
        "timestamp": event.timestamp.isoformat(timespec="milliseconds"),
        "partition": event.partition,
        "offset": event.offset,
        "tag_offset": event.tag_offset,
    }


@app.command()
def read(
    tag: Annotated[str, typer.Argument(help="The tag, for example: paid")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as events come; Ctrl-C ends it.")] = False,
    after: Annotated[str | None, typer.Option(help="A tag_offset to resume behind.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Begin at this ISO moment, zone included.")] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only these topics; may be repeated.")] = None,
    consistency: Annotated[
        str | None, typer.Option(help='"horizon" (nothing arrives late) or "delay" (behind the clock).')
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print the replicated events of a tag, in one order for everybody."""
    if after is not None and since is not None:
        raise InvalidInput("give either --after or --since, not both")
    begin: str | datetime | None = after
    if since is not None:
        try:
            begin = datetime.fromisoformat(since)
        except ValueError as error:
            raise InvalidInput(f"--since: {since!r} is no ISO moment") from error

    async def go() -> None:
        way = cast("Consistency | None", consistency)
        async with tidebook.open(chosen(book)) as opened:
            async for event in opened.tags.read(
                tag,
                after=begin,
                follow=follow,
                topics=topic or None,
                consistency=way,
            ):
                row = tagged_row(event)
                output.emit(
                    row, f"{row['timestamp']}  {event.topic}/{event.id}  {event.seq_nr}  {output.shown(row['payload'])}"
                )

    run(go, json=json)


@app.command("list")
def list_tags(book: BookOption = None, json: JsonOption = False) -> None:
    """Print the tags that have events."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            async for tag in opened.tags.list():
                output.emit({"tag": tag}, tag)

    run(go, json=json)


@app.command()
def rebuild(
    tag: Annotated[str, typer.Argument(help="The tag whose stream is made anew.")],
    topic: Annotated[list[str] | None, typer.Option(help="Only its events of these topics; may be repeated.")] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Write a tag's rows again from the journals in the store, and remove those that no journal speaks of."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            done = await opened.tags.rebuild(tag, topics=topic or None)
            output.emit(
                msgspec.to_builtins(done),
                f"{tag}: {done.written:,} rows of {done.journals:,} journals written, {done.removed:,} removed",
            )

    run(go, json=json)


@app.command()
def status(
    topic: Annotated[list[str] | None, typer.Option(help="Only these topics; may be repeated.")] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print through which time streams are complete, and which partition holds them there."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            horizon = await opened.tags.horizon(topic or None)
            row = horizon_row(horizon, opened.clock.now_ms())
            output.emit(row, f"tags: {shown_horizon(horizon, opened.clock.now_ms())}")

    run(go, json=json)


def horizon_row(horizon: Horizon, now_ms: int) -> dict[str, Any]:
    """The horizon as a line of JSON."""
    return {
        "horizon": _moment(horizon.time_ms),
        "lag_s": None if horizon.time_ms < 0 else max(0, now_ms - horizon.time_ms) / 1000,
        "behind_s": None if horizon.time_ms < 0 else (horizon.most_ms - horizon.time_ms) / 1000,
        "held_by": None if horizon.topic is None else {"topic": horizon.topic, "partition": horizon.partition},
    }


def shown_horizon(horizon: Horizon, now_ms: int) -> str:
    """The horizon in words."""
    if horizon.topic is None:
        return "there are no topics"
    held_by = f"{horizon.topic}/{horizon.partition}"
    if horizon.time_ms < 0:
        return f"nothing is delivered: {held_by} was never replicated"
    lag_s = max(0, now_ms - horizon.time_ms) / 1000
    behind_s = (horizon.most_ms - horizon.time_ms) / 1000
    return (
        f"complete below {_moment(horizon.time_ms)}, {lag_s:,.1f} s ago, where {held_by} stands, "
        f"{behind_s:,.1f} s behind the foremost partition"
    )


def _moment(time_ms: int) -> str | None:
    if time_ms < 0:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
