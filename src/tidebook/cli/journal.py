"""`tidebook journal`: append, read, tail, pointer, delete, purge, ids, snapshot, adopt."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Annotated, Any

import typer

import tidebook
from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event, ReadEvent
from tidebook.core.payload import decode_json
from tidebook.core.seq_nr import FIRST, LAST

app = typer.Typer(help="Event journals: append, read, follow, delete, purge.", no_args_is_help=True)

Topic = Annotated[str, typer.Argument(help="The topic, for example: orders")]
Id = Annotated[str, typer.Argument(help="The journal's id within the topic, for example: o-1")]
Start = Annotated[int, typer.Option(help="The first seq_nr.")]


def payload_of(text: str) -> Any:
    """A JSON value from the command line."""
    try:
        return decode_json(text.encode())
    except ValueError as error:
        raise InvalidInput(f"{text[:60]!r} is no JSON value ({error}): quote text twice, as in '\"text\"'") from error


def shown_payload(payload: Any) -> Any:
    """A payload as JSON can show it."""
    return {"base64": base64.b64encode(payload).decode()} if isinstance(payload, bytes) else payload


def event_row(event: ReadEvent) -> dict[str, Any]:
    """An event as a line of JSON."""
    return {
        "seq_nr": event.seq_nr,
        "payload": shown_payload(event.payload),
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
    output.emit(row, f"{event.seq_nr:>8}  {row['timestamp']}  {output.shown(row['payload'])}{tags}")


def _expiry(seconds: float) -> timedelta | int:
    try:
        return timedelta(seconds=seconds) if seconds else tidebook.NEVER
    except (OverflowError, ValueError) as error:
        raise InvalidInput(f"--expire-after-s {seconds}: {error}") from error


@app.command()
def append(
    topic: Topic,
    id: Id,
    payloads: Annotated[list[str], typer.Argument(metavar="JSON...", help="One JSON value an event.")],
    tag: Annotated[list[str] | None, typer.Option(help="A tag for every event; may be repeated.")] = None,
    expected: Annotated[int | None, typer.Option(help="Append only if the journal stands at this seq_nr.")] = None,
    at: Annotated[int | None, typer.Option(help="The seq_nr of the first event; numbers may be skipped.")] = None,
    metadata: Annotated[str | None, typer.Option(metavar="JSON", help="A JSON object kept with every event.")] = None,
    expire_after_s: Annotated[
        float | None, typer.Option(help="Seconds after which it may be purged; 0: never.")
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Append events to a journal, atomically."""
    events = [
        Event(payload_of(each), tags=tag or (), metadata=payload_of(metadata) if metadata else None)
        for each in payloads
    ]
    expire_after = None if expire_after_s is None else _expiry(expire_after_s)

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            done = await opened.journal(topic).append(id, events, expected=expected, at=at, expire_after=expire_after)
        row = {"first": done.first, "last": done.last, "partition": done.partition, "offset": done.offset}
        output.emit(
            row, f"appended {done.first} to {done.last}" if done.first != done.last else f"appended {done.last}"
        )

    run(go, json=json)


@app.command()
def read(
    topic: Topic,
    id: Id,
    start: Start = FIRST,
    end: Annotated[int, typer.Option(help="The last seq_nr.", show_default="the last")] = LAST,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print a journal's events."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            journal = opened.journal(topic)
            any_ = False
            async for event in journal.read(id, start=start, end=end):
                show_event(event)
                any_ = True
            if not any_ and await journal.pointer(id) is None:
                raise NotFound(f"{topic}/{id}: there is no such journal")

    run(go, json=json)


@app.command()
def tail(topic: Topic, id: Id, start: Start = FIRST, book: BookOption = None, json: JsonOption = False) -> None:
    """Print a journal's events, then each new one as it comes; Ctrl-C ends it."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            async for event in opened.journal(topic).tail(id, start=start):
                show_event(event)

    run(go, json=json)


@app.command()
def pointer(topic: Topic, id: Id, book: BookOption = None, json: JsonOption = False) -> None:
    """Print a journal's last seq_nr."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            last = await opened.journal(topic).pointer(id)
        if last is None:
            raise NotFound(f"{topic}/{id}: there is no such journal")
        output.emit({"seq_nr": last}, str(last))

    run(go, json=json)


@app.command()
def delete(
    topic: Topic,
    id: Id,
    to: Annotated[int, typer.Option(help="Delete the events up to and including this seq_nr.")],
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a journal's older events, never future ones."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            await opened.journal(topic).delete(id, to=to)
        output.emit({"deleted_to": to}, f"deleted up to {to}")

    run(go, json=json)


@app.command()
def purge(topic: Topic, id: Id, book: BookOption = None, json: JsonOption = False) -> None:
    """Remove a journal altogether; the next append begins a new one."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            await opened.journal(topic).purge(id)
        output.emit({"purged": id}, f"purged {topic}/{id}")

    run(go, json=json)


@app.command()
def ids(topic: Topic, book: BookOption = None, json: JsonOption = False) -> None:
    """Print the ids of a topic's journals."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            async for id in opened.journal(topic).ids():
                output.emit({"id": id}, id)

    run(go, json=json)


@app.command()
def snapshot(
    topic: Topic,
    id: Id,
    save: Annotated[str | None, typer.Option(metavar="JSON", help="Save this state instead of printing one.")] = None,
    seq_nr: Annotated[int | None, typer.Option(help="The seq_nr it stands for.", show_default="the last")] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print a journal's newest snapshot, or save one."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            journal = opened.journal(topic)
            if save is not None:
                at = seq_nr if seq_nr is not None else await journal.pointer(id)
                if at is None:
                    raise NotFound(f"{topic}/{id}: there is no such journal")
                await journal.save_snapshot(id, seq_nr=at, payload=payload_of(save))
                output.emit({"saved": at}, f"saved at {at}")
                return
            found = await journal.load_snapshot(id, to=seq_nr if seq_nr is not None else LAST)
            if found is None:
                raise NotFound(f"{topic}/{id}: there is no snapshot")
            row = {
                "seq_nr": found.seq_nr,
                "payload": shown_payload(found.payload),
                "timestamp": found.timestamp.isoformat(timespec="milliseconds"),
            }
            output.emit(row)

    run(go, json=json)


@app.command()
def adopt(topic: Topic, book: BookOption = None, json: JsonOption = False) -> None:
    """Accept a log that was re-made or restored: a new epoch begins on what the store has."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            facts = await opened.journal(topic).adopt()
        output.emit({"topic": topic, "epoch": facts.epoch}, f"{topic} is in epoch {facts.epoch} now")

    run(go, json=json)
