"""`tidebook queue`: put, feed, work, list, listen, status, flags."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

import tidebook
from tidebook.cli import output
from tidebook.cli.journal import payload_of, shown_payload
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.queue.entry import Entry
from tidebook.queue.flag import DeadLetter
from tidebook.queue.listed import Listed, Status
from tidebook.queue.priority import DEFAULT, NAMES
from tidebook.queue.queue import Queue
from tidebook.queue.retry import Retry
from tidebook.queue.worker import Handler, Worker

app = typer.Typer(help="Work queues: priorities, dates, keys, leases.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue, for example: mail")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="At most this many.")]


def priority_of(text: str) -> int:
    """A priority: a number, or its name."""
    if text.lower() in NAMES:
        return NAMES[text.lower()]
    if text.isdecimal() and len(text) <= 3 and int(text) <= 255:
        return int(text)
    raise InvalidInput(f"a priority is 0 to 255 or one of {', '.join(NAMES)}, not {text!r}")


def date_of(text: str | None, name: str) -> datetime | None:
    """A date in ISO 8601, or seconds from now as +30."""
    if text is None:
        return None
    try:
        if text.startswith("+"):
            return datetime.now(UTC) + timedelta(seconds=float(text[1:]))
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{name}: {text!r} is neither a date such as 2030-01-31T12:00:00Z nor +SECONDS") from error


@app.command()
def put(
    queue: Name,
    data: Annotated[list[str], typer.Argument(metavar="JSON...", help="One JSON value an entry.")],
    key: Annotated[str | None, typer.Option(help="While an entry of this key waits, it is merged into that.")] = None,
    priority: Annotated[str, typer.Option(help="0 (first) to 255 (last), or a name.")] = str(DEFAULT),
    process_at: Annotated[str | None, typer.Option(help="Not before this date, or +SECONDS.")] = None,
    expires_at: Annotated[str | None, typer.Option(help="Not after this date, or +SECONDS.")] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Add entries."""
    entries = [
        Entry(
            data=payload_of(each),
            key=key,
            priority=priority_of(priority),
            process_at=date_of(process_at, "--process-at"),
            expires_at=date_of(expires_at, "--expires-at"),
        )
        for each in data
    ]

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            done = await opened.queue(queue).put_many(entries)
        row = {"queue": queue, "inserted": done.inserted, "merged": done.merged}
        output.emit(row, f"put {done.inserted}, merged {done.merged}")

    run(go, json=json)


@app.command("list")
def list_(queue: Name, limit: Limit = 100, book: BookOption = None, json: JsonOption = False) -> None:
    """Print the first entries: those being processed, then those that wait."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            for entry in await (await existing(opened, queue)).entries(limit):
                show_entry(entry)

    run(go, json=json)


@app.command()
def status(
    queue: Annotated[str | None, typer.Argument(metavar="[QUEUE]", help="One queue, or all of them.")] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print queues in numbers."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            found = await opened.queues.status() if queue is None else [await (await existing(opened, queue)).status()]
        for each in found:
            show_status(each)

    run(go, json=json)


@app.command()
def listen(
    queue: Name,
    count: Annotated[int, typer.Option(min=0, help="End after so many; 0: never.")] = 0,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print a line whenever work becomes due; Ctrl-C ends it."""

    async def go() -> None:
        heard = 0
        async with tidebook.open(chosen(book)) as opened:
            async for due in opened.queue(queue).listen():
                output.emit({"queue": queue, "due": due.isoformat(timespec="milliseconds")})
                heard += 1
                if heard == count:
                    return

    run(go, json=json)


@app.command()
def flags(
    queue: Annotated[str | None, typer.Argument(metavar="[QUEUE]", help="One queue, or all of them.")] = None,
    retry: Annotated[list[int] | None, typer.Option(metavar="FLAG", help="Put this dead letter back.")] = None,
    drop: Annotated[list[int] | None, typer.Option(metavar="FLAG", help="Delete this dead letter.")] = None,
    edit: Annotated[int | None, typer.Option(metavar="FLAG", help="Replace its data by --data.")] = None,
    data: Annotated[str | None, typer.Option(metavar="JSON", help="The new data for --edit.")] = None,
    limit: Limit = 100,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Print dead letters; retry, edit or drop them."""
    if (edit is None) != (data is None):
        raise InvalidInput("--edit and --data go together")
    if queue is None and (retry or drop or edit is not None):
        raise InvalidInput("name the queue of the flag")

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            if queue is None:
                for each in await opened.queues.flags(limit):
                    show_flag(each)
                return
            named = await existing(opened, queue)
            if edit is not None and data is not None:
                await named.edit(edit, payload_of(data))
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
        list[str], typer.Argument(metavar="[QUEUE] MODULE:NAME", help="The queue, and the handler: mail shop.mail:send")
    ],
    concurrency: Annotated[int, typer.Option(min=1, max=1_000, help="Jobs at one time.")] = 10,
    lease_s: Annotated[float, typer.Option(help="How long a job is held without a heartbeat.")] = 60.0,
    retry_s: Annotated[float, typer.Option(help="The delay after the first failure; it doubles.")] = 1.0,
    retry_max_s: Annotated[float, typer.Option(help="The longest delay after a failure.")] = 3_600.0,
    grace_s: Annotated[float, typer.Option(help="How long running jobs may take to end after a stop.")] = 30.0,
    once: Annotated[bool, typer.Option("--once", help="End when nothing is due.")] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Run a handler over what is due, with heartbeats; SIGTERM and Ctrl-C end it when running jobs are done.

    Without a queue it works on the book's only one.
    """
    if len(work) > 2:
        raise InvalidInput("give a queue and a handler, as in: mail shop.mail:send")
    handler = work[-1]
    found = load_handler(handler)
    retry = Retry(first_s=retry_s, longest_s=max(retry_max_s, retry_s))

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            queue = work[0] if len(work) == 2 else await only_queue(opened)
            worker = Worker(
                opened.queue(queue),
                found,
                concurrency=concurrency,
                lease_s=lease_s,
                retry=retry,
                grace_s=grace_s,
            )
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, worker.stop)
            output.aside.print(f"working on {queue} with {handler}; Ctrl-C ends it", markup=False)
            await worker.run(once=once)
            row = {"queue": queue, "done": worker.done, "failed": worker.failed, "lost": worker.lost}
            output.emit(row, f"done {worker.done}, failed {worker.failed}, lost {worker.lost}")

    run(go, json=json)


@app.command()
def feed(
    queue: Name,
    tag: Annotated[str, typer.Argument(metavar="TAG", help="Events of this tag become entries.")],
    make: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Makes an Entry of an event, or None to leave it out.")
    ] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only events of this topic; may be given again.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when all that is there was put.")] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Put each event of a tag into a queue, exactly once; SIGTERM and Ctrl-C end it."""
    maker: Any = None if make is None else load_handler(make)

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            feeding = opened.feed(tag, queue, make=maker, topics=topic)
            running = asyncio.create_task(feeding.run(follow=not once))
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, running.cancel)
            output.aside.print(f"feeding {queue} from {tag}; Ctrl-C ends it", markup=False)
            try:
                await running
            except asyncio.CancelledError:
                pass
            output.emit({"queue": queue, "tag": tag, "put": feeding.put}, f"put {feeding.put}")

    run(go, json=json)


async def existing(book: tidebook.Book, name: str) -> Queue:
    """A queue that is there: looking for one does not make it."""
    found = book.queue(name)
    if name not in await book.queues.names():
        raise NotFound(f"there is no queue {name!r}: it is made by the first put")
    return found


async def only_queue(book: tidebook.Book) -> str:
    """The name of a book's only queue."""
    names = await book.queues.names()
    if len(names) != 1:
        raise InvalidInput(f"name the queue: the book has {', '.join(names[:10]) or 'none yet'}")
    return names[0]


def load_handler(text: str) -> Handler:
    """A callable by `module:name`, found from the working directory too."""
    module, separator, name = text.partition(":")
    if not separator or not module or not name:
        raise InvalidInput(f"{text!r} is no handler: give it as module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"{text} cannot be loaded: {error}") from error
    if not callable(found):
        raise InvalidInput(f"{text} is not callable")
    handler: Handler = found
    return handler


def show_entry(entry: Listed) -> None:
    """Print an entry."""
    row = msgspec.to_builtins(entry, builtin_types=(bytes,))
    row["data"] = shown_payload(entry.data)
    when = entry.process_at.isoformat(timespec="milliseconds")
    name = entry.key if entry.key is not None else f"#{entry.id}"
    output.emit(row, f"{entry.status}  {entry.priority:>3}  {when}  {name}  {output.shown(row['data'])}")


def show_status(status: Status) -> None:
    """Print a queue in numbers."""
    row = {**msgspec.to_builtins(status), "waiting": status.waiting}
    text = f"{status.queue}: {status.due} due, {status.later} later, {status.processing} processing, {status.dead} dead"
    output.emit(row, text)


def show_flag(flag: DeadLetter) -> None:
    """Print a dead letter."""
    row = msgspec.to_builtins(flag, builtin_types=(bytes,))
    row["data"] = shown_payload(flag.data)
    name = flag.key if flag.key is not None else "without a key"
    output.emit(row, f"{flag.id:>6}  {flag.queue}  {name}  {flag.reason}  {output.shown(row['data'])}")
