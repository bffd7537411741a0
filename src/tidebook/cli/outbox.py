"""`tidebook outbox`: publish, relay, status, parked, migrate, schema."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.bulk_input import STDIN
from tidebook.cli.command import Group, stop_on_signals
from tidebook.cli.options import (
    BookOption,
    JsonOption,
    LimitOption,
    MetricsOption,
    OnceOption,
    YesOption,
    argument,
    book_settings,
    confirm,
    flag,
    is_address,
    number,
    open_address,
    option,
)
from tidebook.core.errors import InvalidInput, TidebookError
from tidebook.core.seq_nr import LAST
from tidebook.outbox.message import message
from tidebook.outbox.migrations.tables import script
from tidebook.outbox.outbox import Outbox
from tidebook.outbox.port import OutboxTopicStatus
from tidebook.outbox.sql import dialect
from tidebook.runtime.metrics import serve_metrics
from tidebook.wiring.book import Book
from tidebook.wiring.outbox import make_outbox
from tidebook.wiring.sync import SyncBook

#: The interval at which the gauges of waiting messages are refreshed while metrics are served.
STATUS_S = 10.0

app = Group(help="Relay messages from SQL transactions to the log, exactly once.", no_args_is_help=True)
parked = Group(help="List messages that are rejected permanently; retry or drop them.")
app.add_typer(parked, name="parked")


def _topic(value: str | None) -> str | None:
    if value is not None and (not value or "\x00" in value):
        raise InvalidInput("a topic must not be empty, nor contain NUL")
    return value


Topic = Annotated[str, argument("TOPIC", "The topic of the messages, for example: orders", callback=_topic)]
Id = Annotated[
    int | None, argument("ID", "The message; use --all for every parked message of the topic.", min=1, max=LAST)
]
All = Annotated[bool, typer.Option("--all", help="Select every parked message of the topic.")]


@contextmanager
def open_outbox(book: str | None, *, create: bool = False, reading: bool = False) -> Iterator[Outbox]:
    """Open the outbox of the chosen book, without its log and store.

    Without `create` the book must exist; with `reading` no tables are created either.
    """
    settings = book_settings(book, create=create)
    if reading:
        section = settings.section("outbox")
        section = msgspec.structs.replace(section, options={**section.options, "create_tables": False})
        settings = msgspec.structs.replace(settings, sections={**settings.sections, "outbox": section})
    outbox = make_outbox(settings, lambda: Book(settings))
    try:
        yield outbox
    finally:
        outbox.close()


@contextmanager
def open_to_operate(book: str | None) -> Iterator[Outbox]:
    """Open the outbox of the chosen book, or of a server, to read its status and to act on parked messages."""
    if is_address(book):
        with SyncBook(open_address(book)) as opened:
            yield opened.outbox
    else:
        with open_outbox(book, reading=True) as outbox:
            yield outbox


@app.command()
def publish(
    book: BookOption,
    topic: Topic,
    payloads: list[str] = argument("PAYLOAD", "One payload per message; - reads one per line from standard input."),
    key: str | None = option("KEY", "Use this key for all messages."),
    partition_key: str | None = option("KEY", "Choose the partition by this key instead."),
    header: list[str] | None = option("NAME=VALUE", "Add this header to all messages; may be repeated."),
    ordered: bool = flag("--ordered", "Wait for other transactions that publish the same key."),
) -> None:
    """Publish messages in one separate transaction."""
    headers = [_header(each) for each in header or []]
    # Payloads are sent as raw bytes, without decoding.
    given = sys.stdin.buffer.read().splitlines() if payloads == STDIN else [os.fsencode(each) for each in payloads]
    if not given:
        raise InvalidInput("standard input is empty: pass one payload per line")
    messages = [
        message(topic=topic, payload=payload, key=key, partition_key=partition_key, headers=headers)
        for payload in given
    ]
    with open_outbox(book, create=True) as outbox:
        outbox.publish_alone(messages, ordered=ordered)
    output.emit({"topic": topic, "published": len(messages)}, f"published {len(messages)} to {topic}")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"--header must be NAME=VALUE, not {text!r}")
    return name, value


@app.command()
def relay(
    book: BookOption,
    threads: int | None = number("Relay N topics at a time.", 1, 10_000, show_default="[outbox] threads, 1"),
    once: OnceOption = False,
    metrics: MetricsOption = None,
) -> None:
    """Relay messages to the log, until Ctrl-C or SIGTERM.

    The first signal lets it finish the current batch; a second one exits immediately.
    """
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    with open_outbox(book) as outbox:
        running = outbox.new_relay(threads=threads)
        with stop_on_signals(running.stop), _metrics_served(outbox, metrics):
            sent = running.run(once=once)
            output.emit({"relayed": sent}, f"relayed {sent}")


@contextmanager
def _metrics_served(outbox: Outbox, address: str | None) -> Iterator[None]:
    """Serve the relay's metrics, and refresh the gauges of waiting messages every `STATUS_S` seconds."""
    if address is None:
        yield
        return
    done = threading.Event()

    def refresh() -> None:
        while True:
            try:
                outbox.status()
            except TidebookError as error:
                logging.getLogger("tidebook.outbox").info("outbox: the status cannot be read: %s", error)
            if done.wait(STATUS_S):
                return

    with serve_metrics(outbox.metrics, address):
        threading.Thread(target=refresh, name="tidebook-outbox-status", daemon=True).start()
        try:
            yield
        finally:
            done.set()


@app.command()
def status(book: BookOption) -> None:
    """Print each topic's waiting messages, its relay, and errors."""
    table = output.Table("topic", "waiting", "oldest", "relayed", "a minute", "parked", "held", "relay", "state")
    with open_to_operate(book) as outbox:
        for each in outbox.status():
            waiting = f"{each.waiting:,}+" if each.waiting_is_bound else each.waiting
            oldest = None if each.oldest_age_ms is None else f"{each.oldest_age_ms / 1000:.1f} s"
            counts = each.relayed, each.per_minute, each.parked, each.held
            table.add(each, each.topic, waiting, oldest, *counts, each.locked_by, _state(each))
    table.print("no topics")


def _state(each: OutboxTopicStatus) -> str | None:
    """Return the pause, the open batch and the notice of a topic as text; None if it has none of them."""
    parts = []
    if each.error:
        rest_s = max(0, each.retry_in_ms or 0) / 1000
        parts.append(f"pauses for {rest_s:.0f} s more after {each.retries} retries: {each.reason}")
    if each.dirty:
        parts.append("a batch is open")
    if each.notice is not None:
        parts.append(f"at least once: {each.notice}")
    return ", ".join(parts) or None


@parked.callback(invoke_without_command=True)
def parked_default(context: typer.Context, book: BookOption = None, json: JsonOption = False) -> None:
    """List messages that are rejected permanently; retry or drop them."""
    if context.invoked_subcommand is None:
        output.choose(json=json)
        parked_list(book, None, 1000)
        return
    for name in ("book", "json"):  # they would be ignored, and the command would act on another book
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidInput(f"--{name} goes after the command: outbox parked {context.invoked_subcommand} --{name}")


@parked.command("list")
def parked_list(
    book: BookOption,
    topic: str | None = argument("TOPIC", "List only this topic.", None, callback=_topic),
    limit: LimitOption = 1000,
) -> None:
    """List parked messages, each with the reason."""
    with open_to_operate(book) as outbox:
        table = output.Table("topic", "id", "state", "key", "bytes", "tries", "reason")
        for each in outbox.parked(topic, limit=limit):
            key = None if each.key is None else each.key.decode(errors="replace")
            cells = (each.topic, str(each.id), each.state, key, each.size_bytes, each.tries, each.reason)
            table.add(each, *cells, key=key)
        table.print("no parked messages")


@parked.command("retry")
def parked_retry(book: BookOption, topic: Topic, id: Id = None, everything: All = False) -> None:
    """Send parked messages again, each before later ones of its key."""
    _one_or_all(id, everything)
    with open_to_operate(book) as outbox:
        count = outbox.parked_retry(topic, id)
    output.emit({"topic": topic, "retried": count}, f"retrying {count}")


@parked.command("drop")
def parked_drop(book: BookOption, topic: Topic, id: Id = None, everything: All = False, yes: YesOption = False) -> None:
    """Delete parked messages; send the messages held after them."""
    _one_or_all(id, everything)
    which = "all parked messages" if everything else f"the parked message {id}"
    confirm(f"Delete {which} of {topic}?", yes=yes, scripts=False)
    with open_to_operate(book) as outbox:
        count = outbox.parked_drop(topic, id)
    output.emit({"topic": topic, "dropped": count}, f"dropped {count}")


def _one_or_all(id: int | None, everything: bool) -> None:
    if (id is None) != everything:
        raise InvalidInput("give either the ID of one message or --all")


@app.command()
def migrate(book: BookOption) -> None:
    """Create the outbox's tables that are missing."""
    with open_outbox(book, create=True) as outbox:
        outbox.create_tables()
    output.emit({"migrated": True}, "the outbox's tables exist")


@app.command()
def schema(
    database: str = argument("DATABASE", "postgresql, mysql (MariaDB too) or sqlite", "postgresql"),
    to: Path | None = option("FILE", "Write the SQL to this file."),
) -> None:
    """Print the outbox's tables as plain SQL."""
    text = script(dialect(database))
    if to is None:
        output.write(text)
        return
    try:
        to.write_text(text)
    except OSError as error:
        raise InvalidInput(f"{to} cannot be written: {error.strerror}") from error
