"""`tidebook queue`: put, feed, work, list, listen, status, flags."""

from __future__ import annotations

import asyncio
import importlib
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tidebook.cli import options, output
from tidebook.cli.help import Group
from tidebook.cli.journal import parse_payload, payload_as_json
from tidebook.cli.options import (
    SECONDS_MAX,
    BookOption,
    JsonOption,
    LimitOption,
    OnceOption,
    TagArgument,
    TopicsOption,
    run,
    seconds,
)
from tidebook.cli.signals import stop_on_signals
from tidebook.cli.tags import parse_time
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.queue.entry import Entry, milliseconds
from tidebook.queue.priority import DEFAULT, NAMES
from tidebook.queue.queue import Queue
from tidebook.queue.queues import queue_name
from tidebook.queue.retry import Retry
from tidebook.queue.views import DeadLetter, EntryView, QueueStatus
from tidebook.queue.worker import Handler, Worker
from tidebook.wiring.book import Book

app = Group(help="Put work into queues, run workers, and handle dead letters.", no_args_is_help=True)


def _name(value: str | None) -> str | None:
    return None if value is None else queue_name(value)


Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue, for example: mail", callback=_name)]
AnyName = Annotated[
    str | None, typer.Argument(metavar="QUEUE", help="The queue; by default all queues.", callback=_name)
]


def parse_priority(text: str) -> int:
    """Parse a priority, given as a number or a name."""
    if text.lower() in NAMES:
        return NAMES[text.lower()]
    if text.isdecimal() and len(text) <= 3 and int(text) <= 255:
        return int(text)
    raise InvalidInput(f"--priority is 0 to 255 or one of {', '.join(NAMES)}, not {text!r}")


def parse_date(text: str | None, option: str) -> datetime | None:
    """Parse a time, given in ISO 8601 with a time zone or as seconds from now, as in +30."""
    if text is None:
        return None
    if not text.startswith("+"):
        date = parse_time(option, text)
        milliseconds(date, option)
        return date
    try:
        delay_s = float(text[1:])
    except ValueError:
        delay_s = -1.0
    if not 0 <= delay_s <= SECONDS_MAX:
        raise InvalidInput(f"{option}: {text!r} is neither a time such as 2030-01-31T12:00:00Z nor +SECONDS")
    return datetime.now(UTC) + timedelta(seconds=delay_s)


@app.command()
def put(
    queue: Name,
    data: Annotated[list[str], typer.Argument(metavar="JSON", help="One JSON value per entry.")],
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Merge with the waiting entry of this key, if one exists.")
    ] = None,
    priority: Annotated[str, typer.Option(metavar="N", help="0 (first) to 255 (last), or a name.")] = str(DEFAULT),
    process_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Do not process it before this time, or +SECONDS from now.")
    ] = None,
    expires_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Drop it after this time, or +SECONDS from now.")
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Put entries into a queue."""
    entries = [
        Entry(
            data=parse_payload(each),
            key=key,
            priority=parse_priority(priority),
            process_at=parse_date(process_at, "--process-at"),
            expires_at=parse_date(expires_at, "--expires-at"),
        )
        for each in data
    ]

    async def go() -> None:
        async with options.open_book(book, create=True) as each:
            done = await each.queue(queue).put_many(entries)
        row = {"queue": queue, "inserted": done.inserted, "merged": done.merged}
        output.emit(row, f"put {done.inserted}, merged {done.merged}")

    run(go, json=json)


@app.command("list")
def list_(queue: Name, limit: LimitOption = 100, book: BookOption = None, json: JsonOption = False) -> None:
    """Print the first entries: in progress, then waiting."""

    async def go() -> None:
        async with options.open_book(book) as each:
            for entry in await (await existing_queue(each, queue)).entries(limit):
                show_entry(entry)

    run(go, json=json)


@app.command()
def status(
    queue: AnyName = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Count the due, scheduled, running and dead entries."""

    async def go() -> None:
        async with options.open_book(book) as each:
            found = (
                await each.queues.status() if queue is None else [await (await existing_queue(each, queue)).status()]
            )
        for one in found:
            show_status(one)

    run(go, json=json)


@app.command()
def listen(
    queue: Name,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Exit after N lines.")] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print a line whenever work becomes due, until Ctrl-C."""

    async def go() -> None:
        printed = 0
        async with options.open_book(book) as each:
            async for due in (await existing_queue(each, queue)).listen():
                output.emit({"queue": queue, "due": due.isoformat(timespec="milliseconds")})
                printed += 1
                if printed == limit:
                    return

    run(go, json=json)


@app.command()
def flags(
    queue: AnyName = None,
    retry: Annotated[
        list[int] | None, typer.Option(metavar="FLAG", help="Put this dead letter back; may be repeated.")
    ] = None,
    drop: Annotated[
        list[int] | None, typer.Option(metavar="FLAG", help="Delete this dead letter; may be repeated.")
    ] = None,
    edit: Annotated[
        int | None, typer.Option(metavar="FLAG", help="Replace this dead letter's data with --data.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="JSON", help="The new data for --edit.")] = None,
    limit: LimitOption = 100,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print dead letters, or retry, edit or drop them."""
    if (edit is None) != (data is None):
        raise InvalidInput("--edit needs --data, and --data needs --edit")
    if queue is None and (retry or drop or edit is not None):
        raise InvalidInput("name the queue of the dead letter")

    async def go() -> None:
        async with options.open_book(book) as opened:
            if queue is None:
                for each in await opened.queues.flags(limit):
                    show_flag(each)
                return
            named = await existing_queue(opened, queue)
            if edit is not None and data is not None:
                await named.edit(edit, parse_payload(data))
                output.emit({"edited": edit}, f"edited {edit}")
            for flag in retry or ():
                await named.retry(flag)
                output.emit({"retried": flag}, f"put {flag} back")
            for flag in drop or ():
                await named.drop(flag)
                output.emit({"dropped": flag}, f"dropped {flag}")
            if edit is None and not retry and not drop:
                for each in await named.flags(limit):
                    show_flag(each)

    run(go, json=json)


@app.command()
def work(
    work: Annotated[
        list[str],
        typer.Argument(metavar="[QUEUE] MODULE:NAME", help="The queue, and the handler, as in: mail shop.mail:send"),
    ],
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, max=1_000, help="Run N jobs at a time.")] = 10,
    lease_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Let another worker take a job after this time without a heartbeat.",
            callback=seconds("--lease-s", least=0.001),
        ),
    ] = 60.0,
    retry_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Wait this long after the first failure; each further failure doubles it.",
            callback=seconds("--retry-s"),
        ),
    ] = 1.0,
    retry_max_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Wait at most this long after a failure.", callback=seconds("--retry-max-s")
        ),
    ] = 3_600.0,
    grace_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Give running jobs this long to finish after a signal.",
            callback=seconds("--grace-s"),
        ),
    ] = 30.0,
    once: OnceOption = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Run a handler on entries as they become due, with heartbeats.

    The first SIGINT or SIGTERM lets running jobs finish; a second one exits immediately. The queue may be omitted if
    the book has only one.
    """
    if len(work) > 2:
        raise InvalidInput("give a queue and a handler, as in: mail shop.mail:send")
    handler = work[-1]
    found = load_handler(handler)
    retry = Retry(first_s=retry_s, longest_s=max(retry_max_s, retry_s))

    async def go() -> None:
        async with options.open_book(book) as each:
            queue = work[0] if len(work) == 2 else await only_queue(each)
            worker = Worker(
                each.queue(queue),
                found,
                concurrency=concurrency,
                lease_s=lease_s,
                retry=retry,
                grace_s=grace_s,
            )
            loop = asyncio.get_running_loop()
            with stop_on_signals(lambda: loop.call_soon_threadsafe(worker.stop)):
                output.stderr.print(f"working on {queue} with {handler}; press Ctrl-C to stop", markup=False)
                await worker.run(once=once)
                row = {"queue": queue, "done": worker.done, "failed": worker.failed, "lost": worker.lost}
                output.emit(row, f"done {worker.done}, failed {worker.failed}, lost {worker.lost}")

    run(go, json=json)


@app.command()
def feed(
    queue: Name,
    tag: TagArgument,
    make: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="The function that turns an event into an Entry, or None to skip it."),
    ] = None,
    topic: TopicsOption = None,
    once: OnceOption = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Put each event of a tag into a queue, exactly once."""
    maker: Any = None if make is None else load_handler(make)

    async def go() -> None:
        async with options.open_book(book) as each:
            feeding = each.feed(tag, queue, make=maker, topics=topic)
            running = asyncio.create_task(feeding.run(follow=not once))
            loop = asyncio.get_running_loop()
            with stop_on_signals(lambda: loop.call_soon_threadsafe(running.cancel)):
                output.stderr.print(f"feeding {queue} from {tag}; press Ctrl-C to stop", markup=False)
                try:
                    await running
                except asyncio.CancelledError:
                    pass
                output.emit({"queue": queue, "tag": tag, "put": feeding.put}, f"put {feeding.put}")

    run(go, json=json)


async def existing_queue(book: Book, name: str) -> Queue:
    """Return an existing queue; raise `NotFound` if there is none, and do not create it."""
    found = book.queue(name)
    if name not in await book.queues.names():
        raise NotFound(f"there is no queue {name!r}: the first put creates it")
    return found


async def only_queue(book: Book) -> str:
    """Return the name of a book's only queue; raise `InvalidInput` if there is not exactly one."""
    names = await book.queues.names()
    if len(names) != 1:
        raise InvalidInput(f"name the queue: the book has {', '.join(names[:10]) or 'none yet'}")
    return names[0]


def load_handler(text: str) -> Handler:
    """Import a callable given as `module:name`; search the working directory too."""
    module, separator, name = text.partition(":")
    if not separator or not module or not name:
        raise InvalidInput(f"{text!r} is not a handler: write it as module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the module, which may raise anything
        raise InvalidInput(f"{text} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise InvalidInput(f"{text} is not callable")
    handler: Handler = found
    return handler


def show_entry(entry: EntryView) -> None:
    """Print an entry."""
    row = msgspec.to_builtins(entry, builtin_types=(bytes,))
    row["data"] = payload_as_json(entry.data)
    when = entry.process_at.isoformat(timespec="milliseconds")
    name = entry.key if entry.key is not None else f"#{entry.id}"
    output.emit(row, f"{entry.status}  {entry.priority:>3}  {when}  {name}  {output.format_value(row['data'])}")


def show_status(status: QueueStatus) -> None:
    """Print the counts of a queue."""
    row = {**msgspec.to_builtins(status), "waiting": status.waiting}
    text = f"{status.queue}: {status.due} due, {status.later} later, {status.processing} processing, {status.dead} dead"
    output.emit(row, text)


def show_flag(flag: DeadLetter) -> None:
    """Print a dead letter."""
    row = msgspec.to_builtins(flag, builtin_types=(bytes,))
    row["data"] = payload_as_json(flag.data)
    name = flag.key if flag.key is not None else "without a key"
    output.emit(row, f"{flag.id:>6}  {flag.queue}  {name}  {flag.reason}  {output.format_value(row['data'])}")
