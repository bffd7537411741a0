"""`tidebook journal`: append, read, tail, pointer, delete, purge, ids, snapshot, adopt."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Annotated, Any

import typer

import tidebook
from tidebook.cli import output
from tidebook.cli.help import Group
from tidebook.cli.options import (
    BookOption,
    IdArgument,
    JsonOption,
    StartOption,
    TopicArgument,
    open_book,
    require_topic,
    run,
    seconds,
)
from tidebook.core.action import expiry_ms
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event, ReadEvent
from tidebook.core.payload import decode_json
from tidebook.core.seq_nr import FIRST, LAST

app = Group(help="Append to event journals, read, follow, delete and purge them.", no_args_is_help=True)


def parse_payload(text: str) -> Any:
    """Parse a JSON value from the command line; raise `InvalidInput` if it is not valid."""
    try:
        return decode_json(text.encode())
    except ValueError as error:
        raise InvalidInput(f"{text[:60]!r} is no JSON value ({error}): quote text twice, as in '\"text\"'") from error


def payload_as_json(payload: Any) -> Any:
    """Return a payload as a JSON value; bytes become base64."""
    return {"base64": base64.b64encode(payload).decode()} if isinstance(payload, bytes) else payload


def event_row(event: ReadEvent) -> dict[str, Any]:
    """Return an event as a JSON object."""
    return {
        "seq_nr": event.seq_nr,
        "payload": payload_as_json(event.payload),
        "tags": sorted(event.tags),
        "metadata": event.metadata,
        "timestamp": event.timestamp.isoformat(timespec="milliseconds"),
        "partition": event.partition,
        "offset": event.offset,
    }


def show_event(event: ReadEvent) -> None:
    """Print an event."""
    row = event_row(event)
    tags = f"  [{', '.join(row['tags'])}]" if row["tags"] else ""
    output.emit(row, f"{event.seq_nr:>8}  {row['timestamp']}  {output.format_value(row['payload'])}{tags}")


def _expiry(after_s: float) -> timedelta | int:
    if after_s == 0:
        return tidebook.NEVER
    try:
        expiry = timedelta(seconds=after_s)
        expiry_ms(expiry)
    except (OverflowError, InvalidInput) as error:
        raise InvalidInput(f"--expire-after-s is a time from 0.001 s to about 100 years, not {after_s:g}") from error
    return expiry


@app.command()
def append(
    topic: TopicArgument,
    id: IdArgument,
    payloads: Annotated[list[str], typer.Argument(metavar="JSON", help="One JSON value per event.")],
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Add this tag to every event; may be repeated.")
    ] = None,
    expected: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=LAST, help="Append only if the last sequence number is N; 0: no journal yet."
        ),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(metavar="N", min=FIRST, max=LAST, help="Give the first event number N; numbers may be skipped."),
    ] = None,
    metadata: Annotated[str | None, typer.Option(metavar="JSON", help="Add this JSON object to every event.")] = None,
    expire_after_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Let the journal expire this long after its last append; 0: never.",
            callback=seconds("--expire-after-s"),
        ),
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Append events to a journal, atomically."""
    if expected is not None and at is not None:
        raise InvalidInput("give either --expected or --at, not both")
    events = [
        Event(parse_payload(each), tags=tag or (), metadata=parse_payload(metadata) if metadata else None)
        for each in payloads
    ]
    expire_after = None if expire_after_s is None else _expiry(expire_after_s)

    async def go() -> None:
        async with open_book(book, create=True) as each:
            done = await each.journal(topic).append(id, events, expected=expected, at=at, expire_after=expire_after)
        row = {"first": done.first, "last": done.last, "partition": done.partition, "offset": done.offset}
        output.emit(
            row, f"appended {done.first} to {done.last}" if done.first != done.last else f"appended {done.last}"
        )

    run(go, json=json)


@app.command()
def read(
    topic: TopicArgument,
    id: IdArgument,
    start: StartOption = FIRST,
    end: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=LAST, help="Stop after this sequence number.", show_default="the last"),
    ] = LAST,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print a journal's events."""

    async def go() -> None:
        async with open_book(book) as each:
            await require_topic(each, topic)
            journal = each.journal(topic)
            found = False
            async for event in journal.read(id, start=start, end=end):
                show_event(event)
                found = True
            if not found and await journal.pointer(id) is None:
                raise NotFound(f"{topic}/{id}: there is no such journal")

    run(go, json=json)


@app.command()
def tail(
    topic: TopicArgument,
    id: IdArgument,
    start: StartOption = FIRST,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print a journal's events, then new events until Ctrl-C.

    The topic must exist; the journal need not.
    """

    async def go() -> None:
        async with open_book(book) as each:
            await require_topic(each, topic)
            async for event in each.journal(topic).tail(id, start=start):
                show_event(event)

    run(go, json=json)


@app.command()
def pointer(topic: TopicArgument, id: IdArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Print a journal's last sequence number."""

    async def go() -> None:
        async with open_book(book) as each:
            await require_topic(each, topic)
            last = await each.journal(topic).pointer(id)
        if last is None:
            raise NotFound(f"{topic}/{id}: there is no such journal")
        output.emit({"seq_nr": last}, str(last))

    run(go, json=json)


@app.command()
def delete(
    topic: TopicArgument,
    id: IdArgument,
    to: Annotated[
        int, typer.Option(metavar="N", min=FIRST, max=LAST, help="Delete the events up to and including number N.")
    ],
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a journal's events up to a number."""

    async def go() -> None:
        async with open_book(book) as each:
            await require_topic(each, topic)
            await each.journal(topic).delete(id, to=to)
        output.emit({"deleted_to": to}, f"deleted up to {to}")

    run(go, json=json)


@app.command()
def purge(topic: TopicArgument, id: IdArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Remove a whole journal; the next append starts a new one."""

    async def go() -> None:
        async with open_book(book) as each:
            await require_topic(each, topic)
            await each.journal(topic).purge(id)
        output.emit({"purged": id}, f"purged {topic}/{id}")

    run(go, json=json)


@app.command()
def ids(topic: TopicArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Print the ids of a topic's journals."""

    async def go() -> None:
        async with open_book(book) as each:
            await require_topic(each, topic)
            async for id in each.journal(topic).ids():
                output.emit({"id": id}, id)

    run(go, json=json)


@app.command()
def snapshot(
    topic: TopicArgument,
    id: IdArgument,
    save: Annotated[str | None, typer.Option(metavar="JSON", help="Save this state as a snapshot.")] = None,
    seq_nr: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=FIRST, max=LAST, help="The last sequence number in the state.", show_default="the last"
        ),
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print a journal's newest snapshot, or save one."""

    async def go() -> None:
        async with open_book(book) as each:
            await require_topic(each, topic)
            journal = each.journal(topic)
            if save is not None:
                at = seq_nr if seq_nr is not None else await journal.pointer(id)
                if at is None:
                    raise NotFound(f"{topic}/{id}: there is no such journal")
                await journal.save_snapshot(id, seq_nr=at, payload=parse_payload(save))
                output.emit({"saved": at}, f"saved at {at}")
                return
            found = await journal.load_snapshot(id, to=seq_nr if seq_nr is not None else LAST)
            if found is None:
                raise NotFound(f"{topic}/{id}: there is no snapshot")
            row = {
                "seq_nr": found.seq_nr,
                "payload": payload_as_json(found.payload),
                "timestamp": found.timestamp.isoformat(timespec="milliseconds"),
            }
            output.emit(row)

    run(go, json=json)


@app.command()
def adopt(topic: TopicArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Start a new epoch on a log that was recreated or restored."""

    async def go() -> None:
        async with open_book(book) as each:
            await require_topic(each, topic)
            config = await each.journal(topic).adopt()
        output.emit({"topic": topic, "epoch": config.epoch}, f"{topic} is now in epoch {config.epoch}")

    run(go, json=json)
