"""`tidebook queue`: put, feed, work, workers, pause, resume, list, listen, status, flags (dead letters)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from tidebook.cli import bulk_input, output
from tidebook.cli.command import Group, run, stop_loop_on_signals
from tidebook.cli.options import (
    SECONDS_MAX,
    BookOption,
    LimitOption,
    OnceOption,
    TagArgument,
    TopicsOption,
    YesOption,
    argument,
    confirm,
    load_callable,
    number,
    open_book,
    option,
    parse_payload,
    parse_time,
    seconds,
)
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.queue.entry import Entry, milliseconds
from tidebook.queue.priority import DEFAULT, NAMES
from tidebook.queue.queue import Queue
from tidebook.queue.queues import queue_name
from tidebook.queue.retry import Retry
from tidebook.queue.views import DeadLetter
from tidebook.wiring.book import Book

app = Group(help="Put work into queues, run workers, and handle dead letters.", no_args_is_help=True)


def _name(value: str | None) -> str | None:
    return None if value is None else queue_name(value)


Name = Annotated[str, argument("QUEUE", "The queue, for example: mail", callback=_name)]
AnyName = Annotated[str | None, argument("QUEUE", "The queue; by default all queues.", callback=_name)]


def parse_priority(text: str) -> int:
    """Parse a priority, given as a number or a name."""
    if text.lower() in NAMES:
        return NAMES[text.lower()]
    if text.isdecimal() and len(text) <= 3 and int(text) <= 255:
        return int(text)
    raise InvalidInput(f"--priority must be 0 to 255 or one of {', '.join(NAMES)}, not {text!r}")


def _parse_date(text: str | None, option: str) -> datetime | None:
    """Parse a time, given in ISO 8601 with a time zone or as seconds from now, such as +30."""
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
    book: BookOption,
    queue: Name,
    data: list[str] = argument("JSON", "One JSON value per entry; - reads one per line from standard input."),
    key: str | None = option("KEY", "Merge with the waiting entry of this key, if one exists."),
    priority: str = option("N", "0 (first) to 255 (last), or a name.", default=str(DEFAULT)),
    process_at: str | None = option("TIME", "Do not process it before this time, or +SECONDS from now."),
    expires_at: str | None = option("TIME", "Drop it after this time, or +SECONDS from now."),
) -> None:
    """Put entries into a queue."""
    level, not_before = parse_priority(priority), _parse_date(process_at, "--process-at")
    not_after = _parse_date(expires_at, "--expires-at")
    inserted = merged = 0

    async def put_values(opened: Book, values: list[Any]) -> None:
        nonlocal inserted, merged
        entries = [
            Entry(data=value, key=key, priority=level, process_at=not_before, expires_at=not_after) for value in values
        ]
        done = await opened.queue(queue).put_many(entries)
        inserted, merged = inserted + done.inserted, merged + done.merged

    try:
        bulk_input.write(open_book(book, create=True), data, "put", put_values)
    finally:
        if inserted or merged:  # including entries put before a failure
            row = {"queue": queue, "inserted": inserted, "merged": merged}
            output.emit(row, f"put {inserted}, merged {merged}")


@app.command("list")
async def list_(book: Book, queue: Name, limit: LimitOption = 100) -> None:
    """Print the first entries: in process, then waiting."""
    table = output.Table("status", "priority", "process at", "id", "key", "data")
    for entry in await (await _existing(book, queue)).entries(limit):
        data = output.payload_as_json(entry.data)
        status = "waiting" if entry.status == "W" else "processing"
        table.add(entry, status, entry.priority, entry.process_at, str(entry.id), entry.key, data, data=data)
    table.print("no entries")


@app.command()
async def status(book: Book, queue: AnyName = None) -> None:
    """Count the entries that are due, due later, in process and dead."""
    found = await book.queues.status() if queue is None else [await (await _existing(book, queue)).status()]
    table = output.Table("queue", "due", "later", "processing", "dead", "paused since")
    for one in found:
        counts = one.due, one.later, one.processing, one.dead
        table.add(one, one.queue, *counts, one.paused_at, waiting=one.waiting)
    table.print("no queues")


@app.command()
async def workers(book: Book, queue: Name, limit: LimitOption = 100) -> None:
    """Print a queue's workers and their heartbeats."""
    table = output.Table("worker", "state", "since", "heartbeat", "running", "done", "failed")
    for one in await (await _existing(book, queue)).workers(limit):
        state = "gone" if one.gone else "live"
        numbers = one.running, one.done, one.failed
        table.add(one, one.name, state, one.started_at, one.heartbeat_at, *numbers)
    table.print("no workers")


@app.command()
async def pause(book: Book, queue: Name) -> None:
    """Prevent workers from claiming entries until the queue is resumed.

    Running jobs continue, and entries can still be put. The pause is stored with the queue and survives restarts.
    """
    await (await _existing(book, queue)).pause()
    output.emit({"queue": queue, "paused": True}, f"{queue} is paused")


@app.command()
async def resume(book: Book, queue: Name) -> None:
    """Allow workers to claim entries of a paused queue again."""
    await (await _existing(book, queue)).resume()
    output.emit({"queue": queue, "paused": False}, f"{queue} is resumed")


@app.command()
async def listen(book: Book, queue: Name, limit: int | None = number("Exit after N lines.", 1, None)) -> None:
    """Print a line whenever work becomes due, until Ctrl-C."""
    printed = 0
    async for due in (await _existing(book, queue)).listen():
        output.emit({"queue": queue, "due": output.format_time(due)})
        printed += 1
        if printed == limit:
            return


@app.command()
def flags(
    book: BookOption,
    queue: AnyName = None,
    retry: list[int] | None = option("ID", "Put this dead letter back; may be repeated."),
    drop: list[int] | None = option("ID", "Delete this dead letter; may be repeated."),
    edit: int | None = option("ID", "Replace this dead letter's data with --data."),
    data: str | None = option("JSON", "The new data for --edit."),
    limit: LimitOption = 100,
    yes: YesOption = False,
) -> None:
    """Print dead letters, or retry, edit or drop them."""
    if (edit is None) != (data is None):
        raise InvalidInput("--edit needs --data, and --data needs --edit")
    if queue is None and (retry or drop or edit is not None):
        raise InvalidInput("name the queue of the dead letter")
    if drop:
        confirm(f"Delete the dead letters {', '.join(map(str, drop))} of {queue}?", yes=yes, scripts=False)

    async def go() -> None:
        async with open_book(book) as opened:
            if queue is None:
                _show_dead_letters(await opened.queues.dead_letters(limit))
                return
            named = await _existing(opened, queue)
            if edit is not None and data is not None:
                await named.edit(edit, parse_payload(data))
                output.emit({"edited": edit}, f"edited {edit}")
            for id in retry or ():
                await named.retry(id)
                output.emit({"retried": id}, f"put {id} back")
            for id in drop or ():
                await named.drop(id)
                output.emit({"dropped": id}, f"dropped {id}")
            if edit is None and not retry and not drop:
                _show_dead_letters(await named.dead_letters(limit))

    run(go())


def _show_dead_letters(letters: list[DeadLetter]) -> None:
    table = output.Table("id", "queue", "key", "reason", "data")
    for letter in letters:
        data = output.payload_as_json(letter.data)
        table.add(letter, str(letter.id), letter.queue, letter.key, letter.reason, data, data=data)
    table.print("no dead letters")


@app.command()
def work(
    book: BookOption,
    work: list[str] = argument("[QUEUE] MODULE:NAME", "The queue and the handler, for example: mail shop.mail:send"),
    concurrency: int = number("Run N jobs at a time.", 1, 1_000, default=10),
    lease_s: float = seconds(
        "Allow another worker to take a job after this time without a heartbeat.", least=0.001, default=60.0
    ),
    retry_s: float = seconds("Wait this long after the first failure; each further failure doubles it.", default=1.0),
    retry_max_s: float = seconds("Wait at most this long after a failure.", default=3_600.0),
    grace_s: float = seconds("Give running jobs this long to finish after a signal.", default=30.0),
    label: str | None = option("NAME", "This worker's name in `queue workers` and the console; by default HOST:PID."),
    once: OnceOption = False,
) -> None:
    """Run a handler on entries as they become due, with heartbeats.

    The first SIGINT or SIGTERM lets running jobs finish; a second one exits immediately. The queue may be omitted if
    the book has only one.
    """
    if len(work) > 2:
        raise InvalidInput("pass a queue and a handler, for example: mail shop.mail:send")
    handler = load_callable(work[-1])
    retry = Retry(first_s=retry_s, longest_s=max(retry_max_s, retry_s))

    async def go() -> None:
        async with open_book(book) as opened:
            names = [work[0]] if len(work) == 2 else await opened.queues.names()
            if len(names) != 1:
                raise InvalidInput(f"name the queue: the book has {', '.join(names[:10]) or 'none yet'}")
            queue = names[0]
            worker = opened.worker(
                queue, handler, concurrency=concurrency, lease_s=lease_s, retry=retry, grace_s=grace_s, label=label
            )
            with stop_loop_on_signals(worker.stop):
                output.note(f"working on {queue} with {work[-1]}; press Ctrl-C to stop")
                await worker.run(once=once)
                row = {"queue": queue, "done": worker.done, "failed": worker.failed, "lost": worker.lost}
                output.emit(row, f"done {worker.done}, failed {worker.failed}, lost {worker.lost}")

    run(go())


@app.command()
def feed(
    book: BookOption,
    queue: Name,
    tag: TagArgument,
    make: str | None = option("MODULE:NAME", "The function that turns an event into an Entry, or None to skip it."),
    topic: TopicsOption = None,
    once: OnceOption = False,
) -> None:
    """Put each event of a tag into a queue, exactly once."""
    maker: Any = None if make is None else load_callable(make)

    async def go() -> None:
        async with open_book(book) as opened:
            feeding = opened.feed(tag, queue, make=maker, topics=topic)
            running = asyncio.create_task(feeding.run(follow=not once))
            with stop_loop_on_signals(running.cancel):
                output.note(f"feeding {queue} from {tag}; press Ctrl-C to stop")
                with suppress(asyncio.CancelledError):
                    await running
                output.emit({"queue": queue, "tag": tag, "put": feeding.put}, f"put {feeding.put}")

    run(go())


async def _existing(book: Book, name: str) -> Queue:
    """Return an existing queue; raise `NotFound` if there is none, and do not create it."""
    found = book.queue(name)
    if name not in await book.queues.names():
        raise NotFound(f"there is no queue {name!r}: the first put creates it")
    return found
