"""`tidebook journal`: append, read, tail, pointer, delete, purge, ids, snapshot, adopt."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import tidebook
from tidebook.cli import bulk_input, output
from tidebook.cli.command import Group
from tidebook.cli.options import (
    BookOption,
    IdArgument,
    StartOption,
    TopicArgument,
    argument,
    number,
    open_book,
    option,
    parse_payload,
    seconds,
)
from tidebook.core.action import expiry_ms
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event, ReadEvent
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.wiring.book import Book

app = Group(help="Append to event journals, read, follow, delete and purge them.", no_args_is_help=True)


async def _existing(book: Book, topic: str) -> Journal:
    """Return the journals of an existing topic; raise `NotFound` instead of creating a missing one."""
    if topic not in await book.topics():
        raise NotFound(f"topic {topic}: there is no such topic in this book; the first append creates it")
    return book.journal(topic)


async def _last(journal: Journal, topic: str, id: str) -> int:
    """Return a journal's last sequence number; raise `NotFound` if it does not exist."""
    last = await journal.pointer(id)
    if last is None:
        raise NotFound(f"{topic}/{id}: there is no such journal")
    return last


def _show(event: ReadEvent) -> None:
    row = output.fields_of(event, "seq_nr", "payload", "tags", "metadata", "timestamp", "partition", "offset")
    if event.type is not None:
        row |= {"type": event.type, "version": event.version}
    tags = f"  [{', '.join(row['tags'])}]" if row["tags"] else ""
    type = output.describe_type(event.type, event.version)
    output.emit(row, f"{event.seq_nr:>8}  {row['timestamp']}  {type}{output.format_value(row['payload'])}{tags}")


def _expiry(after_s: float) -> timedelta | int:
    if after_s == 0:
        return tidebook.NEVER
    try:
        expiry = timedelta(seconds=after_s)
        expiry_ms(expiry)
    except (OverflowError, InvalidInput) as error:
        raise InvalidInput(f"--expire-after-s must be from 0.001 s to about 100 years, not {after_s:g}") from error
    return expiry


@app.command()
def append(
    book: BookOption,
    topic: TopicArgument,
    id: IdArgument,
    payloads: list[str] = argument("JSON", "One JSON value per event; - reads one per line from standard input."),
    tag: list[str] | None = option("TAG", "Add this tag to every event; may be repeated."),
    expected: int | None = number("Append only if the last sequence number is N; 0: no journal yet.", 0),
    at: int | None = number("Number the first event N; numbers may be skipped.", FIRST),
    metadata: str | None = option("JSON", "Add this JSON object to every event."),
    type: str | None = option("NAME", "The type of every event; a topic with typed events needs it."),
    version: int | None = number("The version of that type; 1 by default.", 1),
    expire_after_s: float | None = seconds("Expire the journal this long after its last append; 0: never."),
) -> None:
    """Append events to a journal, atomically.

    With `-`, the events from standard input are appended in batches; each batch is atomic.
    """
    if expected is not None and at is not None:
        raise InvalidInput("give either --expected or --at, not both")
    if version is not None and type is None:
        raise InvalidInput("--version needs --type: it is the version of a type")
    properties = None if metadata is None else parse_payload(metadata)
    expire_after = None if expire_after_s is None else _expiry(expire_after_s)
    first: Appended | None = None
    last: Appended | None = None

    async def append_values(opened: Book, values: list[Any]) -> None:
        nonlocal first, last
        after = None if last is None else last.last
        done = await opened.journal(topic).append(
            id,
            [Event(value, tags=tag or (), metadata=properties, type=type, version=version or 1) for value in values],
            expected=expected if after is None or expected is None else after,
            at=at if after is None or at is None else after + 1,
            expire_after=expire_after,
        )
        first, last = first or done, done

    try:
        bulk_input.write(open_book(book, create=True), payloads, "append", append_values)
    finally:
        if first is not None and last is not None:  # also the events appended before a failure
            row = {"first": first.first, **output.fields_of(last, "last", "partition", "offset")}
            text = f"appended {first.first} to {last.last}" if first.first != last.last else f"appended {last.last}"
            output.emit(row, text)


@app.command()
async def read(
    book: Book,
    topic: TopicArgument,
    id: IdArgument,
    start: StartOption = FIRST,
    end: int = number("Stop after this sequence number.", show_default="the last", default=LAST),
) -> None:
    """Print a journal's events."""
    journal = await _existing(book, topic)
    found = False
    async for event in journal.read(id, start=start, end=end):
        _show(event)
        found = True
    if not found:
        await _last(journal, topic, id)


@app.command()
async def tail(book: Book, topic: TopicArgument, id: IdArgument, start: StartOption = FIRST) -> None:
    """Print a journal's events, then new events until Ctrl-C.

    The topic must exist; the journal need not.
    """
    async for event in (await _existing(book, topic)).tail(id, start=start):
        _show(event)


@app.command()
async def pointer(book: Book, topic: TopicArgument, id: IdArgument) -> None:
    """Print a journal's last sequence number."""
    last = await _last(await _existing(book, topic), topic, id)
    output.emit({"seq_nr": last}, str(last))


@app.command(question="Delete the events of {topic}/{id} up to number {to}?")
async def delete(
    book: Book,
    topic: TopicArgument,
    id: IdArgument,
    to: int = number("Delete the events up to and including number N.", FIRST, default=...),
) -> None:
    """Delete a journal's events up to a number."""
    journal = await _existing(book, topic)
    deleted_to = min(to, await _last(journal, topic, id))
    await journal.delete(id, to=to)
    output.emit({"deleted_to": deleted_to}, f"deleted up to {deleted_to}")


@app.command(question="Remove the journal {topic}/{id} and all its events?")
async def purge(book: Book, topic: TopicArgument, id: IdArgument) -> None:
    """Remove a whole journal; the next append starts a new one."""
    journal = await _existing(book, topic)
    await _last(journal, topic, id)
    await journal.purge(id)
    output.emit({"purged": id}, f"purged {topic}/{id}")


@app.command()
async def ids(book: Book, topic: TopicArgument) -> None:
    """Print the ids of a topic's journals."""
    found = False
    async for id in (await _existing(book, topic)).ids():
        output.emit({"id": id}, id)
        found = True
    if not found:
        output.note_empty("no journals")


@app.command()
async def snapshot(
    book: Book,
    topic: TopicArgument,
    id: IdArgument,
    save: str | None = option("JSON", "Save this state as a snapshot."),
    seq_nr: int | None = number(
        "With --save: the sequence number that the state includes. Otherwise: print the newest snapshot at or below N.",
        FIRST,
        show_default="the last",
    ),
) -> None:
    """Print a journal's newest snapshot, or save one."""
    journal = await _existing(book, topic)
    if save is not None:
        at = seq_nr if seq_nr is not None else await _last(journal, topic, id)
        await journal.save_snapshot(id, seq_nr=at, payload=parse_payload(save))
        output.emit({"saved": at}, f"saved at {at}")
        return
    found = await journal.load_snapshot(id, to=seq_nr if seq_nr is not None else LAST)
    if found is None:
        raise NotFound(f"{topic}/{id}: there is no snapshot")
    output.emit(output.fields_of(found, "seq_nr", "payload", "timestamp"))


@app.command()
async def adopt(book: Book, topic: TopicArgument) -> None:
    """Start a new epoch on a log that was recreated or restored."""
    config = await (await _existing(book, topic)).adopt()
    output.emit({"topic": topic, "epoch": config.epoch}, f"{topic} is now in epoch {config.epoch}")
