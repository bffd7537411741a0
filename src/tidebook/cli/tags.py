"""`tidebook tags`: read a tag's stream, list tags, print how complete streams are, rebuild a tag."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.help import Group
from tidebook.cli.journal import payload_as_json
from tidebook.cli.options import BookOption, JsonOption, TagArgument, TopicsOption, open_book, run
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.tags.event import TaggedEvent, decode_offset
from tidebook.tags.horizon import Horizon, HorizonStatus
from tidebook.tags.settings import Consistency
from tidebook.wiring.book import Book

app = Group(help="Read streams of events by tag, across journals.", no_args_is_help=True)


class ConsistencyChoice(StrEnum):
    """The values of `--consistency`."""

    HORIZON = "horizon"
    DELAY = "delay"


def tagged_row(event: TaggedEvent) -> dict[str, Any]:
    """Return an event as a JSON object."""
    return {
        "topic": event.topic,
        "id": event.id,
        "seq_nr": event.seq_nr,
        "tag_seq_nr": event.tag_seq_nr,
        "payload": payload_as_json(event.payload),
        "tags": sorted(event.tags),
        "metadata": event.metadata,
        "timestamp": event.timestamp.isoformat(timespec="milliseconds"),
        "partition": event.partition,
        "offset": event.offset,
        "tag_offset": event.tag_offset,
    }


@app.command()
def read(
    tag: TagArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new events until Ctrl-C.")] = False,
    after: Annotated[str | None, typer.Option(metavar="OFFSET", help="Resume after this tag_offset.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Start at this time: 2030-01-31T12:00:00Z")] = None,
    topic: TopicsOption = None,
    consistency: Annotated[
        ConsistencyChoice | None,
        typer.Option(
            metavar="horizon|delay", help="horizon: no event arrives late; delay: stay a fixed time behind the clock."
        ),
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print the replicated events of a tag, in order."""
    start = _start(tag, after, since)

    async def go() -> None:
        mode: Consistency | None = None if consistency is None else consistency.value
        found = False
        async with open_book(book) as each:
            async for event in each.tags.read(
                tag,
                after=start,
                follow=follow,
                topics=topic or None,
                consistency=mode,
                on_waiting=report_waiting,
            ):
                found = True
                row = tagged_row(event)
                payload = output.format_value(row["payload"])
                output.emit(row, f"{row['timestamp']}  {event.topic}/{event.id}  {event.seq_nr}  {payload}")
            status = await each.tags.status(topic or None)
            if status.lag:  # an unreplicated record may carry the tag, so it cannot be reported as missing
                output.stderr.print(f"incomplete: {status.describe()}", markup=False, soft_wrap=True)
            elif not found and not await _exists(each, tag):
                raise NotFound(f"there is no tag {tag!r}: no event carries it")

    run(go, json=json)


def _start(tag: str, after: str | None, since: str | None) -> str | datetime | None:
    """Return the start of a read, from --after or --since."""
    if after is not None and since is not None:
        raise InvalidInput("give either --after or --since, not both")
    if since is not None:
        return parse_time("--since", since)
    if after is not None:
        try:
            decode_offset(tag, after)
        except InvalidInput as error:
            raise InvalidInput(f"--after {after[:60]!r} is not a tag_offset printed by tidebook tags read") from error
    return after


async def _exists(book: Book, tag: str) -> bool:
    async for each in book.tags.list():
        if each == tag:
            return True
    return False


def report_waiting(status: HorizonStatus) -> None:
    """Print to standard error that a stream waits for replication."""
    output.stderr.print(
        f"waiting for replication for {status.stalled_s:.0f} s: {status.describe()}", markup=False, soft_wrap=True
    )


@app.command("list")
def list_tags(book: BookOption = None, json: JsonOption = False) -> None:
    """Print the tags that have events."""

    async def go() -> None:
        async with open_book(book) as each:
            async for tag in each.tags.list():
                output.emit({"tag": tag}, tag)

    run(go, json=json)


@app.command()
def rebuild(
    tag: TagArgument,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Rebuild a tag's rows from the journals in the store."""

    async def go() -> None:
        async with open_book(book) as each:
            done = await each.tags.rebuild(tag, topics=topic or None)
            output.emit(
                msgspec.to_builtins(done),
                f"{tag}: {done.written:,} rows of {done.journals:,} journals written, {done.removed:,} removed",
            )

    run(go, json=json)


@app.command()
def status(
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print the time up to which streams are complete."""

    async def go() -> None:
        async with open_book(book) as each:
            horizon = await each.tags.horizon(topic or None)
            row = horizon_row(horizon, each.clock.now_ms())
            output.emit(row, f"tags: {format_horizon(horizon, each.clock.now_ms())}")

    run(go, json=json)


def horizon_row(horizon: Horizon, now_ms: int) -> dict[str, Any]:
    """Return the horizon as a JSON object."""
    return {
        "horizon": _format_time(horizon.time_ms),
        "lag_s": None if horizon.time_ms < 0 else max(0, now_ms - horizon.time_ms) / 1000,
        "behind_s": None if horizon.time_ms < 0 else (horizon.most_ms - horizon.time_ms) / 1000,
        "held_by": None if horizon.topic is None else {"topic": horizon.topic, "partition": horizon.partition},
    }


def format_horizon(horizon: Horizon, now_ms: int) -> str:
    """Return the horizon as text."""
    if horizon.topic is None:
        return "there are no topics"
    held_by = f"{horizon.topic}/{horizon.partition}"
    if horizon.time_ms < 0:
        return f"nothing is delivered: {held_by} was never replicated"
    lag_s = max(0, now_ms - horizon.time_ms) / 1000
    behind_s = (horizon.most_ms - horizon.time_ms) / 1000
    return (
        f"complete below {_format_time(horizon.time_ms)}, {lag_s:,.1f} s ago, limited by {held_by}, "
        f"{behind_s:,.1f} s behind the most recent partition"
    )


def parse_time(option: str, text: str) -> datetime:
    """Parse an option's time in ISO 8601; raise `InvalidInput` if it has no time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{option}: {text!r} is not a time such as 2030-01-31T12:00:00Z") from error
    if found.tzinfo is None:
        raise InvalidInput(f"{option}: {text!r} has no time zone: write {text}Z for UTC, or an offset such as +02:00")
    return found


def _format_time(time_ms: int) -> str | None:
    if time_ms < 0:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
