"""`tidebook up`: a book, open, with a live status, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
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

import tidebook
from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.cli.up_jobs import ReplicationChild, purge_by_the_clock, wait_for
from tidebook.pipeline.settings import pipeline_settings
from tidebook.wiring.book import Book
from tidebook.wiring.status import TopicStatus, topic_statuses


def up(
    book: BookOption = None,
    json: JsonOption = False,
    every_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the book.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the status once and end.")] = False,
    replicate: Annotated[
        bool, typer.Option(help="Replicate the log to the store on local Spark, and purge what has expired.")
    ] = True,
) -> None:
    """Open a book with everything embedded, and show how it stands until Ctrl-C."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            where = opened.settings.folder.resolve()
            if output.human():
                output.console.print(
                    f"Tidebook is open in [bold]{escape(str(where))}[/bold]. Ctrl-C ends it; nothing is lost."
                )
                output.console.print("Try in another terminal:", style="dim")
                example = f"{_command()} journal append orders o-1 '{{\"total\": 3}}' --book {quote(str(where))}"
                output.console.print(f"  {example}", markup=False, soft_wrap=True)
            else:
                output.emit({"open": str(where)})
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            child = ReplicationChild(chosen(book), opened.settings.folder)
            jobs: list[Coroutine[Any, Any, None]] = []
            if replicate and not once:
                every = pipeline_settings(opened.settings).purge_every_s
                jobs = [child.run(stop), purge_by_the_clock(opened, stop, every)]
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(job)
                try:
                    await _watch(opened, stop, every_s, child if jobs else None, once=once)
                finally:
                    stop.set()

    run(go, json=json)


def _command() -> str:
    """How this very Tidebook is called from a terminal in the same folder, where no environment is active."""
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


def _table(statuses: list[TopicStatus], child: ReplicationChild | None) -> Table:
    table = Table(title="Journals", title_justify="left", caption_justify="left")
    captions = [] if statuses else ["No topic yet: the first append makes one."]
    if child is not None:
        captions.append(f"Replication: {child.state}")
    table.caption = Text("\n".join(captions), style="table.caption") if captions else None  # no markup: it has brackets
    table.add_column("topic")
    for name in ("partitions", "records in the log", "not replicated yet"):
        table.add_column(name, justify="right")
    for status in statuses:
        table.add_row(status.topic, f"{status.partitions:,}", f"{status.records:,}", f"{status.lag:,}")
    return table
