"""`tidebook up`: replicate a book and show its live status until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, book_path, open_book, run
from tidebook.cli.signals import stop_on_signals
from tidebook.cli.up_jobs import ReplicationChild, purge_periodically, wait_for
from tidebook.pipeline.session import pipeline_settings
from tidebook.wiring.book import Book
from tidebook.wiring.status import JournalTopicStatus, topic_statuses


def up(
    book: BookOption = None,
    json: JsonOption = False,
    every_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.05, help="Refresh the status at this interval.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the status once, then exit.")] = False,
    replicate: Annotated[
        bool, typer.Option(help="Replicate the log to the store on local Spark, and purge expired journals.")
    ] = True,
) -> None:
    """Run a book: replicate it and show its status, until Ctrl-C."""

    async def go() -> None:
        async with open_book(book, create=True) as each:
            await each.create()
            where = each.settings.folder.resolve()
            if output.human():
                output.console.print(
                    f"Tidebook is open in [bold]{escape(str(where))}[/bold]. Press Ctrl-C to stop; no data is lost."
                )
                output.console.print("Try in another terminal:", style="dim")
                example = f"{_command()} journal append orders o-1 '{{\"total\": 3}}' --book {quote(str(where))}"
                output.console.print(f"  {example}", markup=False, soft_wrap=True)
            else:
                output.emit({"open": str(where)})
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            child = ReplicationChild(book_path(book), each.settings.folder)
            jobs: list[Coroutine[Any, Any, None]] = []
            if replicate and not once:
                every = pipeline_settings(each.settings).purge_every_s
                jobs = [child.run(stop), purge_periodically(each, stop, every)]
            with stop_on_signals(lambda: loop.call_soon_threadsafe(stop.set)):
                async with asyncio.TaskGroup() as group:
                    for job in jobs:
                        group.create_task(job)
                    try:
                        await _watch(each, stop, every_s, child if jobs else None, once=once)
                    finally:
                        stop.set()

    run(go, json=json)


def _command() -> str:
    """Return the command that runs this installation from a terminal in the same folder without an active venv."""
    script = Path(sys.executable).with_name("tidebook")
    if script.is_relative_to(Path.cwd()):
        return quote(str(script.relative_to(Path.cwd())))
    return "tidebook" if which("tidebook") else quote(str(script))


async def _watch(
    book: Book, stop: asyncio.Event, every_s: float, child: ReplicationChild | None, *, once: bool
) -> None:
    if not output.human():
        shown: dict[str, Any] | None = None
        while not stop.is_set():
            found: dict[str, Any] = {"topics": [status.as_row() for status in await topic_statuses(book)]}
            if child is not None:
                found["replication"] = child.state
            if found != shown:
                shown = found
                output.emit(found)
            if once or await wait_for(stop, every_s):
                return
        return
    with Live(console=output.console, auto_refresh=False) as live:
        while not stop.is_set():
            live.update(_table(await topic_statuses(book), child), refresh=True)
            if once or await wait_for(stop, every_s):
                return


def _table(statuses: list[JournalTopicStatus], child: ReplicationChild | None) -> Table:
    table = Table(title="Journals", title_justify="left", caption_justify="left")
    captions = [] if statuses else ["There is no topic yet: the first append creates one."]
    if child is not None:
        captions.append(f"Replication: {child.state}")
    table.caption = (
        Text("\n".join(captions), style="table.caption") if captions else None
    )  # not markup: the text may contain brackets
    table.add_column("topic")
    for name in ("partitions", "records in the log", "not replicated yet"):
        table.add_column(name, justify="right")
    for status in statuses:
        table.add_row(status.topic, f"{status.partitions:,}", f"{status.records:,}", f"{status.lag:,}")
    return table
