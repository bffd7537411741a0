"""`tidebook import`: kafka-journal, deimos."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import typer

from tidebook.cli import output
from tidebook.cli.command import Group
from tidebook.cli.options import BookOption, TopicsOption, flag, number, open_book, option
from tidebook.core.errors import InvalidInput
from tidebook.importing.journal_import import (
    JOURNALS_AT_ONCE,
    ImportState,
    ImportSummary,
    JournalImport,
    JournalResult,
)
from tidebook.importing.kafka_journal_tables import KafkaJournalTables
from tidebook.wiring.adapters import connect_cassandra, extra
from tidebook.wiring.book import Book

#: The interval of progress lines on standard error.
PROGRESS_S = 2.0

app = Group(help="Copy journals and messages of other systems into a book.", no_args_is_help=True)


class ImportProgress:
    """Prints a line of counts on standard error at an interval."""

    def __init__(self) -> None:
        self._started_s = self._shown_s = time.monotonic()

    def show(self, text: str) -> None:
        """Print the text and the elapsed time, unless a line was printed a moment ago."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= PROGRESS_S:
            self._shown_s = now_s
            output.note(f"tidebook: {text}, {now_s - self._started_s:.0f} s")


@asynccontextmanager
async def _open_target(book: str | None) -> AsyncIterator[Book]:
    if "://" in (book or ""):
        raise InvalidInput("an import writes to the book itself, not through a server: give a folder or a .toml")
    async with open_book(book, create=True) as opened:
        yield opened


@app.command("kafka-journal", check=True)
async def kafka_journal(
    book: BookOption,
    cassandra: str = option("ADDRESS", "HOST:PORT, cassandra://user@HOST:PORT, or a .toml file with [store].", ...),
    keyspace: str = option("NAME", "The keyspace of kafka-journal.", ...),
    topic: TopicsOption = None,
    dry_run: bool = flag("--dry-run", "Read and check everything, and write nothing."),
    verify: bool = typer.Option(True, help="Compare each journal with its source after it is copied."),
    at_once: int = number("Copy this many journals at the same time.", 1, 1_000, JOURNALS_AT_ONCE),
) -> None:
    """Copy the journals that kafka-journal keeps in Cassandra.

    Stop its writers and let its replicator finish first. Exit with code 1 if a journal was refused.
    """
    async with _open_target(book) as opened:
        session = await connect_cassandra(cassandra, keyspace, metrics=opened.metrics)
        try:
            tables = await KafkaJournalTables.find(session, keyspace)
            for pointer in await tables.pointers():
                output.emit(
                    pointer, f"{pointer.topic}/{pointer.partition} is replicated up to offset {pointer.offset:,}"
                )
            seen, progress = ImportSummary(), ImportProgress()

            def report(result: JournalResult) -> None:
                seen.add(result)
                progress.show(f"{seen.journals:,} journals, {seen.appended:,} of {seen.events:,} events copied")
                if result.state is ImportState.REFUSED:
                    output.emit(result, f"refused {result.topic}/{result.id}: {result.reason}")

            summary = await JournalImport(
                tables,
                opened,
                today=datetime.now(UTC).date(),
                topics=topic,
                dry_run=dry_run,
                verify=verify,
                at_once=at_once,
            ).run(report)
        finally:
            await session.close()
    verb = "would be copied" if dry_run else "copied and compared" if verify else "copied"
    output.emit(
        summary,
        f"{summary.journals:,} journals: {summary.imported:,} {verb} ({summary.appended:,} events), "
        f"{summary.complete:,} complete already, {summary.expired:,} expired, {summary.refused:,} refused",
        dry_run=dry_run,
    )
    if summary.refused:
        raise typer.Exit(1)


@app.command("deimos", check=True)
async def deimos(
    book: BookOption,
    postgres: str = option("URL", "The database of Deimos: postgresql://user@HOST/DATABASE", ...),
    queue: str | None = option("NAME", "Put the messages into this queue instead of the outbox."),
    topic: list[str] | None = option("TOPIC", "Copy only this topic; may be repeated."),
    dry_run: bool = flag("--dry-run", "Count the messages, and write nothing."),
) -> None:
    """Copy the messages that wait in Deimos' tables.

    They go into the book's outbox, or into a queue. Stop Deimos' executors and the writers first. Exit with code 1 if
    a topic is not completely copied.
    """
    tables_module = extra("tidebook.importing.deimos_tables", "postgres")
    from tidebook.importing.message_import import MessageImport
    from tidebook.importing.message_target import MessageTarget, OutboxTarget, QueueTarget

    async with _open_target(book) as opened, tables_module.open_deimos_tables(postgres) as tables:
        target: MessageTarget | None = None
        if not dry_run:
            target = OutboxTarget(opened.outbox.blocking) if queue is None else QueueTarget(opened.queue(queue))
        progress = ImportProgress()
        try:
            results = await MessageImport(tables, target, topics=topic).run(
                lambda name, copied: progress.show(f"{name}: {copied:,} messages copied")
            )
        finally:
            if target is not None:
                await target.close()
    for result in results:
        counts = f"{result.messages:,} waiting" if dry_run else f"{result.copied:,} copied, {result.messages:,} waiting"
        output.emit(result, f"{result.topic}: {counts}" + (f": {result.problem}" if result.problem else ""))
    totals = {
        "topics": len(results),
        "messages": sum(each.messages for each in results),
        "copied": sum(each.copied for each in results),
        "problems": sum(each.problem is not None for each in results),
        "dry_run": dry_run,
    }
    counts = "{topics:,} topics, {messages:,} messages, {copied:,} copied, {problems:,} problems"
    output.emit(totals, counts.format(**totals))
    if totals["problems"]:
        raise typer.Exit(1)
