"""`tidebook tags`: read a stream by tag, list the tags."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, cast

import typer

import tidebook
from tidebook.cli import output
from tidebook.cli.journal import shown_payload
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.core.errors import InvalidInput
from tidebook.tags.event import TaggedEvent
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
