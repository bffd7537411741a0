"""`tidebook up`: a book, open, with a live status, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

import tidebook
from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.wiring.book import Book
from tidebook.wiring.status import TopicStatus, topic_statuses


def up(
    book: BookOption = None,
    json: JsonOption = False,
    every_s: Annotated[float, typer.Option(help="Seconds between two looks at the book.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the status once and end.")] = False,
) -> None:
    """Open a book with everything embedded, and show how it stands until Ctrl-C."""

    async def go() -> None:
        async with tidebook.open(chosen(book)) as opened:
            where = opened.settings.folder.resolve()
            if output.human():
                output.console.print(f"Tidebook is open in [bold]{where}[/bold]. Ctrl-C ends it; nothing is lost.")
                output.console.print("Try in another terminal:", style="dim")
                output.console.print(
                    f"  tidebook journal append orders o-1 '{{\"total\": 3}}' --book {where}", markup=False
                )
            else:
                output.emit({"open": str(where)})
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            await _watch(opened, stop, every_s, once=once)

    run(go, json=json)


async def _watch(book: Book, stop: asyncio.Event, every_s: float, *, once: bool) -> None:
    if not output.human():
        shown: list[TopicStatus] | None = None
        while not stop.is_set():
            found = await topic_statuses(book)
            if found != shown:
                shown = found
                output.emit({"topics": [status.as_row() for status in found]})
            if once or await _stopped(stop, every_s):
                return
        return
    with Live(console=output.console, auto_refresh=False) as live:
        while not stop.is_set():
            live.update(_table(await topic_statuses(book)), refresh=True)
            if once or await _stopped(stop, every_s):
                return


async def _stopped(stop: asyncio.Event, within_s: float) -> bool:
    try:
        await asyncio.wait_for(stop.wait(), within_s)
    except TimeoutError:
        return False
    return True


def _table(statuses: list[TopicStatus]) -> Table:
    table = Table(title="Journals", title_justify="left", caption_justify="left")
    if not statuses:
        table.caption = "No topic yet: the first append makes one."
    table.add_column("topic")
    for name in ("partitions", "records in the log", "not replicated yet"):
        table.add_column(name, justify="right")
    for status in statuses:
        table.add_row(status.topic, f"{status.partitions:,}", f"{status.records:,}", f"{status.lag:,}")
    return table
