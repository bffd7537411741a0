"""`tidebook outbox`: publish, relay, status, parked, and the tables."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, chosen
from tidebook.core.errors import InvalidInput, TidebookError
from tidebook.outbox.message import Message, message
from tidebook.outbox.outbox import Outbox
from tidebook.pipeline.exposition import serving
from tidebook.sql.migrate.outbox import script
from tidebook.sql.port.dialect import dialect
from tidebook.sql.port.outbox import ParkedMessage, TopicStatus
from tidebook.wiring.book import Book
from tidebook.wiring.outbox import make_outbox
from tidebook.wiring.settings import read_settings

#: How often the gauges of what waits are renewed, where metrics are served.
STATUS_S = 10.0

app = typer.Typer(help="Messages from a SQL transaction to Kafka, in order and once.", no_args_is_help=True)
parked = typer.Typer(help="Messages that Kafka can never take, and what waits behind them.")
app.add_typer(parked, name="parked")

Topic = Annotated[str, typer.Argument(help="The Kafka topic, for example: orders")]
Id = Annotated[int | None, typer.Argument(metavar="ID", help="One message; without it, --all of the topic.")]
All = Annotated[bool, typer.Option("--all", help="Every parked message of the topic.")]


@contextmanager
def opened(book: str | None, *, json: bool) -> Iterator[Outbox]:
    """The outbox of the chosen book; log and store are not opened for it."""
    output.choose(json=json)
    settings = read_settings(chosen(book))
    outbox = make_outbox(settings, lambda: Book(settings))
    try:
        yield outbox
    finally:
        outbox.close()


@app.command()
def publish(
    topic: Topic,
    payloads: Annotated[
        list[str], typer.Argument(metavar="PAYLOAD...", help="One message each; - reads one line each, as it is.")
    ],
    key: Annotated[str | None, typer.Option(help="The key of all of them.")] = None,
    partition_key: Annotated[str | None, typer.Option(help="Chooses the partition in the key's place.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be given more than once.")] = None,
    ordered: Annotated[bool, typer.Option("--ordered", help="Wait for others that publish the same key.")] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Publish messages in a transaction of their own."""
    headers = dict(_header(each) for each in header or [])
    # Payloads are raw: whatever bytes came are sent.
    given = sys.stdin.buffer.read().splitlines() if payloads == ["-"] else [os.fsencode(each) for each in payloads]
    messages: list[Message] = [
        message(topic=topic, payload=payload, key=key, partition_key=partition_key, headers=headers)
        for payload in given
    ]
    with opened(book, json=json) as outbox:
        outbox.publish_alone(messages, ordered=ordered)
    output.emit({"topic": topic, "published": len(messages)}, f"published {len(messages)} to {topic}")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"a header is NAME=VALUE, not {text!r}")
    return name, value


@app.command()
def relay(
    threads: Annotated[
        int | None, typer.Option(help="How many topics at once.", show_default="[outbox] threads, 1")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Send what waits, then end.")] = False,
    metrics: Annotated[
        str | None, typer.Option(help="Serve /metrics for Prometheus there.", metavar="HOST:PORT")
    ] = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Relay messages to the log until INT or TERM, which let it finish the batch in hand; a second one ends it."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    with opened(book, json=json) as outbox:
        running = outbox.new_relay(threads=threads)

        asked = False

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            if asked:  # a server may neither answer nor fail: as safe as any other sudden death of a relay
                os._exit(128 + number)
            asked = True
            running.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        with _metrics_served(outbox, metrics):
            sent = running.run(once=once)
    output.emit({"relayed": sent}, f"relayed {sent}")


@contextmanager
def _metrics_served(outbox: Outbox, address: str | None) -> Iterator[None]:
    """The relay's metrics, and what waits, looked at now and then."""
    if address is None:
        yield
        return
    done = threading.Event()

    def look() -> None:
        while True:
            try:
                outbox.status()
            except TidebookError as error:
                logging.getLogger("tidebook.outbox").info("outbox: no status: %s", error)
            if done.wait(STATUS_S):
                return

    with serving(outbox.metrics, address):
        threading.Thread(target=look, name="tidebook-outbox-status", daemon=True).start()
        try:
            yield
        finally:
            done.set()


@app.command()
def status(book: BookOption = None, json: JsonOption = False) -> None:
    """Show every topic: what waits and for how long, who relays it, what went wrong."""
    with opened(book, json=json) as outbox:
        for each in outbox.status():
            output.emit(msgspec.to_builtins(each), _sentence(each))


def _sentence(each: TopicStatus) -> str:
    count = f"{each.waiting:,}{'+' if each.waiting_is_bound else ''}"
    parts = [f"{each.topic}: {count} waiting"]
    if each.oldest_age_ms is not None:
        parts.append(f"the oldest for {each.oldest_age_ms / 1000:.1f} s")
    parts.append(f"{each.relayed:,} relayed, {each.per_minute:,} in the last minute")
    if each.locked_by is not None:
        parts.append(f"held by {each.locked_by}")
    if each.parked or each.held:
        parts.append(f"{each.parked:,} parked, {each.held:,} held behind them")
    if each.error:
        rest_s = max(0, each.retry_in_ms or 0) / 1000
        parts.append(f"rests for {rest_s:.0f} s more after {each.retries} retries: {each.reason}")
    if each.dirty:
        parts.append("a batch is open")
    if each.notice is not None:
        parts.append(f"at least once: {each.notice}")
    return ", ".join(parts)


@parked.callback(invoke_without_command=True)
def parked_default(context: typer.Context, book: BookOption = None, json: JsonOption = False) -> None:
    """List what is parked, or retry or drop it."""
    if context.invoked_subcommand is None:
        parked_list(None, book=book, json=json)


@parked.command("list")
def parked_list(
    topic: Annotated[str | None, typer.Argument(help="This topic alone.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 1000,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """List messages that lie aside, with the reason."""
    with opened(book, json=json) as outbox:
        for each in outbox.parked(topic, limit=limit):
            output.emit(_row(each), _line(each))


def _row(each: ParkedMessage) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(each, builtin_types=(bytes,))
    row["key"] = None if each.key is None else each.key.decode(errors="replace")
    return row


def _line(each: ParkedMessage) -> str:
    key = "no key" if each.key is None else f"key {each.key.decode(errors='replace')!r}"
    return f"{each.topic} {each.id}: {each.state}, {key}, {each.size_bytes:,} bytes, {each.tries} tries: {each.reason}"


@parked.command("retry")
def parked_retry(
    topic: Topic, id: Id = None, everything: All = False, book: BookOption = None, json: JsonOption = False
) -> None:
    """Send parked messages again, each in its place before later ones of its key."""
    _one_or_all(id, everything)
    with opened(book, json=json) as outbox:
        count = outbox.parked_retry(topic, id)
    output.emit({"topic": topic, "retried": count}, f"{count} are sent again")


@parked.command("drop")
def parked_drop(
    topic: Topic, id: Id = None, everything: All = False, book: BookOption = None, json: JsonOption = False
) -> None:
    """Delete parked messages for good; what they held goes on."""
    _one_or_all(id, everything)
    with opened(book, json=json) as outbox:
        count = outbox.parked_drop(topic, id)
    output.emit({"topic": topic, "dropped": count}, f"{count} were dropped")


def _one_or_all(id: int | None, everything: bool) -> None:
    if (id is None) != everything:
        raise InvalidInput("name one message by its id, or give --all")


@app.command()
def migrate(book: BookOption = None, json: JsonOption = False) -> None:
    """Make the outbox's tables in the book's database, where they are missing."""
    with opened(book, json=json) as outbox:
        outbox.create_tables()
    output.emit({"migrated": True}, "the outbox's tables are there")


@app.command()
def schema(
    database: Annotated[str, typer.Argument(help="postgresql, mysql (MariaDB too) or sqlite")] = "postgresql",
    to: Annotated[Path | None, typer.Option(help="Write it to a file.")] = None,
) -> None:
    """Print the outbox's tables as plain SQL."""
    text = script(dialect(database))
    if to is None:
        sys.stdout.write(text)
        return
    try:
        to.write_text(text)
    except OSError as error:
        raise InvalidInput(f"{to} cannot be written: {error.strerror}") from error
