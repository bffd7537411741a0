"""`tidebook tags`: read a tag's stream, list tags, print how complete streams are, rebuild a tag."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import typer

from tidebook.cli import output
from tidebook.cli.command import Group
from tidebook.cli.options import BookOption, TagArgument, TopicsOption, open_book, option, parse_time
from tidebook.cli.topics import require_topics
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


@app.command()
async def read(
    book: BookOption,
    tag: TagArgument,
    follow: bool = typer.Option(False, "--follow", "-f", help="Wait for new events until Ctrl-C."),
    after: str | None = option("OFFSET", "Resume after this tag_offset."),
    since: str | None = option("TIME", "Start at this time, for example 2030-01-31T12:00:00Z"),
    topic: TopicsOption = None,
    consistency: ConsistencyChoice | None = option(
        "horizon|delay", "horizon: no event arrives late; delay: stay a fixed time behind the clock."
    ),
) -> None:
    """Print the replicated events of a tag, in order."""
    start = _start(tag, after, since)
    mode: Consistency | None = None if consistency is None else consistency.value
    found = False
    async with open_book(book) as opened:
        if not follow:
            await require_topics(opened, topic)
        tags = opened.tags
        async for event in tags.read(
            tag, after=start, follow=follow, topics=topic or None, consistency=mode, on_waiting=_report_waiting
        ):
            found = True
            _show(event)
        status = await tags.status(topic or None)
        if status.lag:  # an unreplicated record may carry the tag, so a missing tag is not an error yet
            output.note(f"incomplete: {status.describe()}")
        elif not found and tag not in [each async for each in tags.list()]:
            raise NotFound(f"there is no tag {tag!r}: no event carries it")


def _start(tag: str, after: str | None, since: str | None) -> str | datetime | None:
    """Return the start of a read, from --after or --since."""
    if after is not None and since is not None:
        raise InvalidInput("use either --after or --since, not both")
    if since is not None:
        return parse_time("--since", since)
    if after is not None:
        try:
            decode_offset(tag, after)
        except InvalidInput as error:
            raise InvalidInput(f"--after {after[:60]!r} is not a tag_offset printed by tidebook tags read") from error
    return after


def _show(event: TaggedEvent) -> None:
    row = output.fields_of(event, "topic", "id", "seq_nr", "tag_seq_nr", "payload", "tags", "metadata", "timestamp")
    row |= output.fields_of(event, "partition", "offset", "tag_offset")
    if event.type is not None:
        row |= {"type": event.type, "version": event.version}
    payload = f"{output.describe_type(event.type, event.version)}{output.format_value(row['payload'])}"
    output.emit(row, f"{row['timestamp']}  {event.topic}/{event.id}  {event.seq_nr}  {payload}")


def _report_waiting(status: HorizonStatus) -> None:
    output.note(f"waiting for replication ({status.stalled_s:.0f} s so far): {status.describe()}")


@app.command("list")
async def list_tags(book: Book) -> None:
    """Print the tags that have events."""
    found = False
    async for tag in book.tags.list():
        output.emit({"tag": tag}, tag)
        found = True
    if not found:
        output.note_empty("no tags")


@app.command()
async def rebuild(book: Book, tag: TagArgument, topic: TopicsOption = None) -> None:
    """Rebuild a tag's rows from the journals in the store."""
    done = await book.tags.rebuild(tag, topics=topic or None)
    text = f"{tag}: {done.written:,} rows of {done.journals:,} journals written, {done.removed:,} removed"
    output.emit(done, text)


@app.command()
async def status(book: Book, topic: TopicsOption = None) -> None:
    """Print the time up to which streams are complete."""
    await require_topics(book, topic)
    row, text = describe_horizon(await book.tags.horizon(topic or None), book.clock.now_ms())
    output.emit(row, text)


def describe_horizon(horizon: Horizon, now_ms: int) -> tuple[dict[str, Any], str]:
    """Return the horizon as a JSON object and as text."""
    if horizon.topic is None:
        return {"horizon": None, "lag_s": None, "behind_s": None, "held_by": None}, "tags: there are no topics"
    held_by = {"topic": horizon.topic, "partition": horizon.partition}
    at = f"{horizon.topic}/{horizon.partition}"
    if horizon.time_ms < 0:
        row = {"horizon": None, "lag_s": None, "behind_s": None, "held_by": held_by}
        return row, f"tags: nothing is delivered: {at} was never replicated"
    time = output.format_time(datetime.fromtimestamp(horizon.time_ms / 1000, UTC))
    lag_s, behind_s = max(0, now_ms - horizon.time_ms) / 1000, (horizon.most_ms - horizon.time_ms) / 1000
    text = (
        f"tags: complete below {time}, which was {lag_s:,.1f} s ago; the slowest partition is {at}, "
        f"{behind_s:,.1f} s behind the most recent one"
    )
    return {"horizon": time, "lag_s": lag_s, "behind_s": behind_s, "held_by": held_by}, text
